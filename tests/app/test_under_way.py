"""A key has its share of places and no more, and nobody else feels it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.app.servers import Gate, RunningServer, in_process, live, make_engine

KEYS = ("alice:a", "alice:new", "bob:b")
REJECTIONS = "vllm:admission_rejections_total{reason=max_num_seqs_per_key}"
BODY = {"prompt": "p", "max_tokens": 9}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": BODY,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x"},
    "/v1/messages": CHAT,
    "/v1/embeddings": {"input": "x"},
}


async def ask(server: RunningServer, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return await server.client.post(path, json={**ENDPOINTS[path], **body}, headers={"X-Api-Key": key})


@asynccontextmanager
async def full(gate: Gate, **fields: Any) -> AsyncIterator[tuple[RunningServer, list[asyncio.Task[httpx.Response]]]]:
    """A server on which alice has both of her places taken, by a stream and by an answer that comes whole."""
    fields = {"api_key": KEYS, "max_num_seqs_per_key": 2, **fields}
    async with live(make_engine(gate), **fields) as server, gate:
        asked = [asyncio.create_task(ask(server, "a", stream=is_streamed)) for is_streamed in (True, False)]
        while server.service.loop.num_open_streams < 2:
            await asyncio.sleep(0)
        yield server, asked
        gate.open()
        await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_beyond_its_share_a_key_is_refused_and_others_are_not(path: str):
    """Whichever of its keys it comes with, and wherever to. Streams too are refused by their status."""
    async with full(gate := Gate()) as (server, asked):
        refusals = [await ask(server, key, path) for key in ("a", "new")]
        if path != "/v1/embeddings":
            refusals.append(await ask(server, "a", path, stream=True))
        others = asyncio.create_task(ask(server, "b", path))
        gate.open()

        assert [200] * 3 == [(await task).status_code for task in (*asked, others)]
        assert len(refusals) == (await server.metrics())[REJECTIONS]
    for refusal in refusals:
        assert (429, "1") == (refusal.status_code, refusal.headers["retry-after"])
        message = "Rate limit reached for key 'alice': requests in flight are 2, limit is 2"
        assert message == refusal.json()["error"]["message"]


async def test_of_a_burst_as_many_are_served_as_there_are_places():
    gate = Gate()
    async with live(make_engine(gate), max_num_seqs_per_key=2) as server, gate:
        burst = [asyncio.create_task(ask(server, "")) for _ in range(6)]
        while server.service.loop.num_open_streams + sum(task.done() for task in burst) < 6:
            await asyncio.sleep(0)
        gate.open()

        assert [200] * 2 + [429] * 4 == sorted([(await task).status_code for task in burst])


async def test_nothing_is_tokenized_for_a_key_whose_places_are_taken():
    async with full(Gate()) as (server, _):
        refusal = await ask(server, "a", prompt="x" * 5000)

    assert 429 == refusal.status_code


async def test_the_refusal_has_openais_shape_and_anthropics_where_that_is_spoken():
    async with full(Gate()) as (server, _):
        errors = [(await ask(server, "a", path)).json()["error"] for path in ("/v1/completions", "/v1/messages")]

    assert {"type": "requests", "param": None, "code": "rate_limit_exceeded"}.items() <= errors[0].items()
    assert "rate_limit_error" == errors[1]["type"]


@pytest.mark.parametrize("left", [0, 1])
async def test_who_leaves_gives_the_place_back_before_the_step_under_way_has_ended(left: int):
    async with full(gate := Gate()) as (server, asked):
        await gate.until_arrived(1)
        asked[left].cancel()
        while server.service.loop.num_open_streams > 1:
            await asyncio.sleep(0)
        again = asyncio.create_task(ask(server, "a"))
        while server.service.loop.num_open_streams < 2:
            assert not again.done()
            await asyncio.sleep(0)
        gate.open()

        assert 200 == (await again).status_code


async def test_an_answer_gives_its_place_back_whatever_became_of_it():
    """One after the other, by a key of one place: done, refused by the engine's limits, failed."""
    bodies: list[dict[str, Any]] = [{}, {"prompt": "x" * 5000}, {"fault": {"type": "error"}}, {"stream": True}, {}]
    async with in_process(max_num_seqs_per_key=1, enable_fault_injection=True) as server:
        assert [200, 400, 500, 200, 200] == [(await ask(server, "", **body)).status_code for body in bodies]


async def test_each_sequence_is_one_and_a_request_that_never_fits_is_a_mistake():
    async with in_process(api_key=KEYS, max_num_seqs_per_key=4) as server:
        fits = await ask(server, "a", prompt=["x", "y"], n=2)
        never = await ask(server, "a", prompt=["x", "y", "z"], n=2)

        assert (200, 400) == (fits.status_code, never.status_code)
        assert "are 6 sequences, limit for a key is 4" in never.json()["error"]["message"]
        assert 0 == (await server.metrics())[REJECTIONS]


async def test_without_keys_everybody_is_one():
    async with full(Gate(), api_key=()) as (server, _):
        refusal = await ask(server, "whoever")

    assert 429 == refusal.status_code
    assert "for this server: requests in flight are 2" in refusal.json()["error"]["message"]


async def test_what_needs_no_place_is_answered_and_ends_what_has_one():
    async with full(gate := Gate()) as (server, asked):
        headers = {"X-Api-Key": "a"}
        tokens = await server.client.post("/tokenize", json={"prompt": "x"}, headers=headers)
        aborted = await server.client.post("/abort_requests", json={"all": True}, headers=headers)
        again = asyncio.create_task(ask(server, "a"))
        gate.open()

        assert (200, 2) == (tokens.status_code, len(aborted.json()["aborted"]))
        assert 410 == (await asked[1]).status_code
        assert 200 == (await again).status_code
