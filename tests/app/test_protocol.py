"""A request's head is bounded before anybody has seen the request."""

import asyncio
import json

import pytest

from app.protocol import MAX_HEAD_BYTES
from tests.app.servers import Gate, RunningServer, live, make_engine

STREAM = b'{"prompt": "p", "max_tokens": 100, "stream": true}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


async def send_long_head(server: RunningServer, writer: asyncio.StreamWriter, start: bytes, more: bytes) -> None:
    """The start by itself, seen by the server before the rest comes; just so much that it has read all when it acts."""
    writer.write(start)
    await server.client.get("/health")
    writer.write(more * (1 + MAX_HEAD_BYTES // len(more)))


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET /health HTTP/1.1\r\nX-A: ", b"y"),
        (b"GET /health HTTP/1.1\r\n", b"X: y\r\n"),
        (b"GET /", b"x"),
    ],
)
async def test_a_head_that_never_ends_is_cut_off(start: bytes, more: bytes):
    async with live() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await send_long_head(server, writer, start, more)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()

    assert head.startswith(b"HTTP/1.1 431 ")
    assert f"longer than {MAX_HEAD_BYTES} bytes" in json.loads(body)["error"]["message"]


async def test_a_long_head_that_ends_is_read():
    async with live() as server:
        response = await server.client.get("/health", headers={"x-a": "y" * (MAX_HEAD_BYTES // 2)})

    assert 200 == response.status_code


async def test_an_answer_under_way_is_not_written_into():
    """The head came behind a request that is being answered: only the connection ends."""
    gate = Gate()
    async with live(make_engine(gate)) as server, gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(POST % len(STREAM) + STREAM)
        gate.let_through(1)
        begun = await reader.readuntil(b"data: ")
        await send_long_head(server, writer, b"GET / HTTP/1.1\r\n", b"X: y\r\n")
        rest = await reader.read()
        writer.close()

    assert begun.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1" not in rest  # "431" alone may be part of a time or an id
