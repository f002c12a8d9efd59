"""Live servers that the tests share; a test that ends its server, or needs one of its own, calls `serve`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.live import LiveServer, serving

Serve = Callable[..., LiveServer]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def tiny(logs: Path) -> Iterator[LiveServer]:
    """The server that `octavo serve` starts: the embedded model, speculation on."""
    with serving(logs) as server:
        yield server


@pytest.fixture(scope="session")
def scripted(logs: Path) -> Iterator[LiveServer]:
    """The same, and it takes scripts."""
    with serving(logs, "--enable-scripts") as server:
        yield server


@pytest.fixture(scope="session")
def smollm2(logs: Path, smollm2_path: Path) -> Iterator[LiveServer]:
    """SmolLM2 behind its short name, from the directory that it was pulled to."""
    with serving(logs, "smollm2", "--cache-dir", str(smollm2_path.parent)) as server:
        yield server


@pytest.fixture(scope="module")
def serve_module(logs: Path) -> Iterator[Serve]:
    """The same for servers that the tests of one module share."""
    with ExitStack() as stack:
        yield lambda *flags, **options: stack.enter_context(serving(logs, *flags, **options))


@pytest.fixture
def serve(logs: Path) -> Iterator[Serve]:
    """Starts servers with the flags given; they end with the test."""
    with ExitStack() as stack:
        yield lambda *flags, **options: stack.enter_context(serving(logs, *flags, **options))
