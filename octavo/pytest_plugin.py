"""The fixture `octavo_url`, there wherever pytest runs with Octavo installed.

One server serves the whole session; it starts with the first test that asks. Flags beyond the usual ones come from a
fixture of the project's own:

    @pytest.fixture(scope="session")
    def octavo_flags():
        return ["--max-num-seqs", "4"]
"""

from collections.abc import Iterator, Sequence

import pytest


@pytest.fixture(scope="session")
def octavo_flags() -> Sequence[str]:
    """Flags of `octavo serve` for the session's server; to be overridden."""
    return ()


@pytest.fixture(scope="session")
def octavo_url(octavo_flags: Sequence[str]) -> Iterator[str]:
    """The address of a server that takes scripts and faults; OpenAI's clients want it with /v1 behind it."""
    from octavo.testing import octavo_server  # only where it is used: the plugin is loaded by every run of pytest

    with octavo_server(*octavo_flags) as url:
        yield url
