"""What tests of public reports share: the embedded model behind a server, in this process or on a socket.

    async def test_something(serve):
        server = await serve(max_num_seqs=1)                 # fields of app.settings.Settings
        response = await server.complete(prompt="p", **scripted("Hel", "lo", ["a", "b"]))

`serve(live=True)` listens on a port, which disconnects and streams that must be read piece by piece need. Scripts are
taken by every one of these servers. Each test starts its own.
"""

from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from typing import Any, Protocol

import pytest

from app.factory import load
from tests.app.servers import RunningServer, in_process, live, make_settings

ScriptPiece = str | bytes | list[str | bytes]


class Serve(Protocol):
    def __call__(self, *, live: bool = False, **fields: Any) -> Awaitable[RunningServer]: ...


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers of the embedded model; all are stopped when the test ends."""
    start_live = live

    async with AsyncExitStack() as stack:

        async def start(*, live: bool = False, **fields: Any) -> RunningServer:
            fields = {"enable_scripts": True, **fields}
            engine = load(make_settings(**fields))
            return await stack.enter_async_context((start_live if live else in_process)(engine, **fields))

        yield start


def scripted(*pieces: ScriptPiece) -> dict[str, Any]:
    """The body field that makes a request say these pieces, one token each, a list of them in one step."""
    return {"script": [_plain(piece) for piece in pieces]}


def _plain(piece: ScriptPiece) -> Any:
    if isinstance(piece, bytes):
        return list(piece)
    return [_plain(part) for part in piece] if isinstance(piece, list) else piece
