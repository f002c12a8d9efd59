"""The fixture `octavo_url`, there wherever pytest runs with Octavo installed.

One server serves the whole session; it starts with the first test that asks. Flags beyond the usual ones come from a
fixture of the project's own:

    @pytest.fixture(scope="session")
    def octavo_flags():
        return ["--max-num-seqs", "4"]

The ini option `octavo_python` names the Python that runs the server, where what Octavo needs is installed elsewhere
than the tests; a path in it starts at pytest's root directory.
"""

import os
import sys
from collections.abc import Iterator, Sequence

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("octavo_python", "the Python that runs the server of octavo_url; default: the tests' own")


@pytest.fixture(scope="session")
def octavo_flags() -> Sequence[str]:
    """Flags of `octavo serve` for the session's server; to be overridden."""
    return ()


@pytest.fixture(scope="session")
def octavo_url(octavo_flags: Sequence[str], pytestconfig: pytest.Config) -> Iterator[str]:
    """The address of a server that takes scripts and faults; OpenAI's clients want it with /v1 behind it."""
    from octavo.testing import octavo_server  # only where it is used: the plugin is loaded by every run of pytest

    python = pytestconfig.getini("octavo_python") or sys.executable
    if os.sep in python:  # otherwise a command's name
        python = str(pytestconfig.rootpath / python)
    with octavo_server(*octavo_flags, python=python) as url:
        yield url
