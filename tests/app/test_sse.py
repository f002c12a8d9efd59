"""Server-sent events: what is on the wire when all goes well, when it does not, and when nobody listens."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from app.errors import ApiError, ClientGone
from app.schemas.completions import CompletionLogprobs
from app.sse import EventStream, event, while_connected


class Connection:
    """The server's side of one request: what was sent, and a client that leaves when told."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def answer(stream: EventStream, connection: Connection) -> None:
    await stream({"type": "http"}, connection.receive, connection.send)


async def events(*items: bytes | Exception) -> AsyncGenerator[bytes, None]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


def test_an_event_is_one_line_of_json_and_only_of_fields_that_were_set():
    chunk = CompletionLogprobs(tokens=["a\nb"], token_logprobs=[None], top_logprobs=[None], text_offset=[0])

    line, *rest = event(chunk).split(b"\n")
    assert [b"", b""] == rest
    assert "a\nb" == json.loads(line.removeprefix(b"data: "))["tokens"][0]
    assert b"data: {}\n\n" == event(CompletionLogprobs.model_construct())


def test_an_event_is_one_line_to_those_who_know_more_line_ends():
    r"""To `str.splitlines`, and so to httpx's `iter_lines`, ten characters end a line; to events only \r and \n do."""
    text = "\v\f\x1c\x1d\x1e\x85\u2028\u2029\r\n"
    chunk = CompletionLogprobs(tokens=[text], token_logprobs=[None], top_logprobs=[None], text_offset=[0])

    line, end = event(chunk).decode().splitlines()
    assert text == json.loads(line.removeprefix("data: "))["tokens"][0]
    assert "" == end


async def test_the_first_event_leaves_with_the_headers_and_done_comes_last():
    connection = Connection()
    await answer(EventStream(events(b"data: 1\n\n", b": keep-alive\n\n"), {"x-request-id": "r"}), connection)

    headers = dict(connection.sent[0]["headers"])
    assert b"text/event-stream; charset=utf-8" == headers[b"content-type"]
    assert (b"no-cache", b"no", b"r") == tuple(
        headers[name] for name in (b"cache-control", b"x-accel-buffering", b"x-request-id")
    )
    assert b"content-length" not in headers
    assert b"data: 1\n\n: keep-alive\n\ndata: [DONE]\n\n" == connection.body
    assert [True, True, False] == [message["more_body"] for message in connection.sent[1:]]


async def test_a_failure_before_the_first_event_has_a_real_status():
    connection = Connection()
    with pytest.raises(ApiError, match="full"):
        await answer(EventStream(events(ApiError(503, "full")), {}), connection)

    assert [] == connection.sent


async def test_a_failure_later_is_an_event_and_the_stream_still_ends_with_done():
    connection = Connection()
    await answer(EventStream(events(b"data: 1\n\n", RuntimeError("a secret")), {}), connection)

    _, error, done, _ = connection.body.decode().split("\n\n")
    assert "server_error" == json.loads(error.removeprefix("data: "))["error"]["type"]
    assert "secret" not in error
    assert "data: [DONE]" == done


async def test_when_the_client_leaves_the_generator_is_closed_at_once():
    connection = Connection()
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 1\n\n"
            connection.left.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    await answer(EventStream(endless(), {}), connection)

    assert closed.is_set()
    assert b"data: 1\n\n" == connection.body


async def test_work_is_finished_while_the_client_stays():
    connection = Connection()

    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert 7 == await while_connected(connection.receive, work())


async def test_work_is_cancelled_and_cleaned_up_when_the_client_leaves():
    connection = Connection()
    connection.left.set()
    cleaned: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("up")

    with pytest.raises(ClientGone):
        await while_connected(connection.receive, work())
    assert ["up"] == cleaned


async def test_what_work_raises_comes_through():
    async def work() -> None:
        raise ApiError(400, "no")

    with pytest.raises(ApiError, match="no"):
        await while_connected(Connection().receive, work())
