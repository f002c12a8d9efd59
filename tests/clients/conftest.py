"""One server for all clients, run by the environment that has Octavo: the clients have one of their own."""

import os
import sys
from collections.abc import Iterator

import pytest

from octavo.testing import octavo_server

MODEL = "octavo-tiny"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a newer one when it is imported


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with octavo_server(python=os.environ.get("SERVER_PYTHON", sys.executable)) as url:
        yield url


@pytest.fixture
def v1(url: str) -> str:
    """What OpenAI's clients call the base URL."""
    return f"{url}/v1"
