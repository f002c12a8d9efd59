"""Around every request: bodies are bounded, and the caller's request id comes back."""

from collections.abc import AsyncIterator

import pytest

from tests.app.servers import in_process, live


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


async def test_the_callers_request_id_comes_back_on_every_answer():
    async with in_process() as server:
        for path in ("/health", "/nowhere", "/v1/completions"):
            response = await server.client.get(path, headers={"X-Request-Id": "mine"})
            assert ["mine"] == response.headers.get_list("x-request-id")
        assert "x-request-id" not in (await server.client.get("/health")).headers
