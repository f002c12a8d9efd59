"""Around every request: bodies and readers are bounded, and the caller's request id comes back."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.middleware import MAX_UNWATCHED_BYTES, ReaderLimit
from tests.app.servers import Gate, RunningServer, in_process, live, make_engine


async def pieces(num_pieces: int, sent: list[int], *, num_bytes: int = 1000) -> AsyncIterator[bytes]:
    for number in range(num_pieces):
        sent.append(number)
        yield b"x" * num_bytes


@pytest.mark.parametrize("headers", [{}, {"content-length": str(50 * 2**20)}])
async def test_a_client_that_sends_far_too_much_still_hears_the_answer(headers: dict[str, str]):
    """Beyond what sockets hold between them: a server that closed early would reset the connection instead."""
    async with live(max_body_bytes=10_000) as server:
        content = pieces(50, [], num_bytes=2**20)
        response = await server.client.post("/v1/completions", content=content, headers=headers)
        after = await server.client.get("/health")

    assert 413 == response.status_code
    assert "10000 bytes" in response.json()["error"]["message"]
    assert 200 == after.status_code


async def test_a_body_that_turns_out_too_long_is_refused_before_its_end():
    sent: list[int] = []
    async with in_process(max_body_bytes=10_000) as server:
        response = await server.client.post("/v1/completions", content=pieces(1000, sent))

    assert 413 == response.status_code
    assert 11 == len(sent)


async def test_a_body_of_just_the_limit_is_read():
    async with in_process(max_body_bytes=10_000) as server:
        response = await server.client.post("/v1/completions", content=pieces(10, []))

    assert 400 == response.status_code


@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
async def test_a_body_that_does_not_come_in_time_is_408_and_the_connection_closes(framing: str):
    async with live(body_timeout=0.05) as server:
        answer = await sent_and_read(server, f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n")

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert "not complete within 0.05 s" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(("num_bytes", "status"), [(10**7, b"401"), (10**9, b"413")])
async def test_who_has_his_answer_cannot_hold_the_connection_by_sending_on(num_bytes: int, status: bytes):
    """What trickles in keeps uvicorn's own timer from running."""
    fields = {"body_timeout": 0.05, "api_key": ("k",)}
    key = "" if status == b"401" else "Authorization: Bearer k\r\n"
    async with live(**fields) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{key}Content-Length: {num_bytes}\r\n\r\n".encode())
        answer = await reader.readuntil(b"\r\n")
        for _ in range(200_000):
            writer.write(b"x")
            await asyncio.sleep(0)
            if is_cut := reader.at_eof() or reader.exception() is not None:
                break
        writer.close()

    assert is_cut
    assert status == answer.split()[1]


async def test_an_answer_may_take_longer_than_its_body_may():
    gate = Gate()
    async with live(make_engine(gate), body_timeout=0.05) as server, gate:
        asked = asyncio.create_task(server.complete(prompt="p", max_tokens=1))
        await sent_and_read(server, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        gate.open()

        assert 200 == (await asked).status_code


async def sent_and_read(server: RunningServer, text: str) -> bytes:
    """All that comes back, to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(text.encode())
    try:
        return await reader.read()
    except ConnectionResetError:  # cut, which is as good an end
        return b""
    finally:
        writer.close()


async def test_a_client_that_takes_nothing_of_its_answer_counts_as_gone():
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        while True:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    async def send(message: Any) -> None:
        if len(sent) == 2:
            await asyncio.Event().wait()
        sent.append(message)

    await ReaderLimit(application, timeout_s=0)({"type": "http", "path": "/"}, asyncio.Event().wait, send)

    assert 2 == len(sent)


async def test_the_end_of_a_long_answer_waits_for_its_reader():
    """What is sent in one piece is in the transport's buffer at once; only a second piece can wait for room there."""
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.body", "body": b"x" * (MAX_UNWATCHED_BYTES + 1)})

    async def send(message: Any) -> None:
        sent.append((len(message["body"]), message.get("more_body", False)))

    await ReaderLimit(application, timeout_s=1)({"type": "http", "path": "/"}, asyncio.Event().wait, send)

    assert [(MAX_UNWATCHED_BYTES + 1, True), (0, False)] == sent


async def test_the_callers_request_id_comes_back_on_every_answer():
    async with in_process() as server:
        for path in ("/health", "/nowhere", "/v1/completions"):
            response = await server.client.get(path, headers={"X-Request-Id": "mine"})
            assert ["mine"] == response.headers.get_list("x-request-id")
        for given in (b"mine", "étrange".encode(), b"\xff", b"x" * 1000, b'"a\tb"'):
            headers = {"X-Request-Id": given}
            response = await server.client.post("/v1/completions", json={"prompt": "p"}, headers=headers)
            assert (200, [given.decode("latin-1")]) == (response.status_code, _latin1(response, b"x-request-id"))
        assert "x-request-id" not in (await server.client.get("/health")).headers


def _latin1(response: httpx.Response, name: bytes) -> list[str]:
    """Values of a header as they came, whatever encoding their bytes look like."""
    return [value.decode("latin-1") for found, value in response.headers.raw if found.lower() == name]
