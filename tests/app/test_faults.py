"""Faults on purpose: each strikes where it is asked to, whatever the endpoint, and only where the flag allows it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from app.faults import MAX_FAULTS, Fault, KVPool, parse_faults
from core import InvalidRequest
from tests.app.servers import RunningServer, in_process, live

SCRIPT = ["a", "b", "c", "d"]
CHAT = {"messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"prompt": "x"}
ENDPOINTS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


@asynccontextmanager
async def faulty(**fields: Any) -> AsyncIterator[RunningServer]:
    async with live(enable_fault_injection=True, **fields) as server:
        yield server


async def events_of(
    server: RunningServer, path: str = "/v1/completions", body: Any = COMPLETION, *, fault: Any
) -> list[Any]:
    """The chunks of a stream, [DONE] as its name; what came before the connection broke."""
    lines: list[Any] = []
    asked = {**body, "script": SCRIPT, "stream": True, "fault": fault}
    async with server.client.stream("POST", path, json=asked) as response:
        assert 200 == response.status_code
        try:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    lines.append(data if data == "[DONE]" else json.loads(data))
        except httpx.RemoteProtocolError as error:
            lines.append(error)
    return lines


def test_a_fault_is_one_object_or_a_list_of_them():
    assert [] == parse_faults(None)
    assert [Fault(type="error")] == parse_faults({"type": "error"})
    assert [Fault(type="slow", seconds=0.1), Fault(type="disconnect", after_events=3)] == parse_faults(
        [{"type": "slow", "seconds": 0.1}, {"type": "disconnect", "after_events": 3}]
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "valid dictionary"),
        ("error", "valid dictionary"),
        ({}, "type"),
        ({"type": "meteor"}, "type"),
        ({"type": "slow", "seconds": 31}, "seconds"),
        ({"type": "slow", "seconds": -1}, "seconds"),
        ({"type": "slow", "seconds": float("nan")}, "seconds"),
        ({"type": "error", "after_events": 1.5}, "after_events"),
        ({"type": "error", "after_tokens": 1}, "after_tokens"),
        ([{"type": "slow"}] * (MAX_FAULTS + 1), "at most 16 items"),
    ],
)
def test_what_is_no_fault_is_refused_with_what_is_wrong(value: Any, words: str):
    with pytest.raises(InvalidRequest, match=words) as refusal:
        parse_faults(value)
    assert "fault" == refusal.value.param


@pytest.mark.parametrize(("path", "body"), [*ENDPOINTS, ("/tokenize", {"prompt": "x"})])
async def test_without_the_flag_a_fault_is_refused_and_the_flag_named(path: str, body: Any):
    async with in_process() as server:
        response = await server.client.post(path, json={**body, "fault": {"type": "delay"}})

    error = response.json()["error"]
    assert (400, "fault", "unsupported_parameter") == (response.status_code, error["param"], error["code"])
    assert "--enable-fault-injection" in error["message"]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_null_asks_for_nothing_and_needs_no_flag(path: str, body: Any):
    async with in_process() as server:
        assert 200 == (await server.client.post(path, json={**body, "fault": None, "max_tokens": 2})).status_code


async def test_a_body_that_merely_mentions_faults_is_left_alone():
    async with in_process() as server:
        assert 200 == (await server.complete(prompt='"fault"', max_tokens=2)).status_code
        assert 400 == (await server.client.post("/v1/completions", content=b'["fault"]')).status_code
        assert 400 == (await server.client.post("/v1/completions", content=b'{"fault"')).status_code


async def test_a_fault_that_cannot_be_is_a_400_on_the_wire_too():
    async with in_process(enable_fault_injection=True) as server:
        response = await server.complete(prompt="x", fault={"type": "meteor"})

    assert (400, "fault") == (response.status_code, response.json()["error"]["param"])


@pytest.mark.parametrize(
    ("path", "body"), [*ENDPOINTS, ("/v1/responses", {"input": "x"}), ("/v1/messages", {**CHAT, "max_tokens": 2})]
)
@pytest.mark.parametrize("asked", [{}, {"stream": False}])
async def test_a_fault_that_could_only_strike_a_stream_is_refused_without_one(path: str, body: Any, asked: Any):
    faults = [{"type": "delay", "seconds": 0}, {"type": "error", "after_events": 2}]
    async with in_process(enable_fault_injection=True) as server:
        response = await server.client.post(path, json={**body, **asked, "fault": faults})

    assert 400 == response.status_code
    assert "fault has after_events 2, without stream it can only be 0" == response.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_an_error_before_the_first_event_has_a_status(path: str, body: Any):
    async with in_process(enable_fault_injection=True) as server:
        for asked in ({}, {"stream": True}):
            response = await server.client.post(path, json={**body, **asked, "fault": {"type": "error"}})
            assert (500, "injected_fault") == (response.status_code, response.json()["error"]["code"])
        assert 0 == (await server.until_idle())["octavo:kv_blocks_used"]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_an_error_in_mid_stream_is_a_frame_behind_so_many_events(path: str, body: Any):
    async with faulty() as server:
        events = await events_of(server, path, body, fault={"type": "error", "after_events": 2})

    assert ("injected_fault", "[DONE]") == (events[2]["error"]["code"], events[3])
    assert all("choices" in event for event in events[:2])


async def test_a_disconnect_in_mid_stream_breaks_the_connection_and_frees_the_blocks():
    async with faulty() as server:
        *events, error = await events_of(server, fault={"type": "disconnect", "after_events": 3})

        assert "abc" == "".join(event["choices"][0]["text"] for event in events)
        assert isinstance(error, httpx.RemoteProtocolError)
        await server.until_idle()


async def test_a_disconnect_before_the_answer_gives_no_byte():
    async with faulty() as server:
        with pytest.raises(httpx.RemoteProtocolError, match="without sending a response"):
            await server.complete(prompt="x", fault={"type": "disconnect"})
        await server.until_idle()


async def test_slow_events_come_one_by_one_and_are_all_there():
    """Those that came together, while the ones before were slow, too."""
    async with faulty() as server:
        events = await events_of(server, fault={"type": "slow", "after_events": 1, "seconds": 0.001})

    assert (5, "[DONE]") == (len(events) - 1, events[-1])
    assert "abcd" == "".join(event["choices"][0]["text"] for event in events[:-1])


@pytest.mark.parametrize("fault", [{"type": "delay", "seconds": 0.2}, {"type": "slow", "seconds": 0.05}])
async def test_a_delay_lasts_at_least_as_long_as_it_says(fault: Any):
    async with faulty() as server:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        await events_of(server, fault=fault)

        assert 0.2 <= loop.time() - started_s


async def test_a_stall_holds_up_everybody(caplog: pytest.LogCaptureFixture):
    """Who comes while it lasts is answered when it is over; what needs no step is answered meanwhile."""
    async with faulty() as server:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        stalling = asyncio.create_task(server.complete(prompt="x", fault={"type": "stall_engine", "seconds": 0.3}))
        while "fault injected" not in caplog.messages:
            await asyncio.sleep(0)
        other = asyncio.create_task(server.complete(prompt="x", max_tokens=1))
        assert 200 == (await server.client.get("/metrics")).status_code

        assert 200 == (await other).status_code
        assert loop.time() - started_s >= 0.3
        assert 200 == (await stalling).status_code


async def test_a_killed_engine_tells_every_open_stream():
    async with faulty() as server:
        deaths: list[str] = []
        server.service.loop.on_death = lambda: deaths.append("died")
        events = await events_of(server, fault={"type": "kill_engine", "after_events": 2})
        health = await server.client.get("/health")

        assert ("engine_dead", "[DONE]") == (events[2]["error"]["code"], events[3])
        assert (503, ["died"]) == (health.status_code, deaths)


async def test_an_engine_killed_on_arrival_answers_503():
    async with faulty() as server:
        server.service.loop.on_death = None
        response = await server.complete(prompt="x", fault={"type": "kill_engine"})

        assert (503, "engine_dead") == (response.status_code, response.json()["error"]["code"])


async def test_a_full_pool_shows_in_the_gauges_and_ends():
    async with faulty() as server:
        fault = {"type": "fill_kv_pool", "seconds": 0.5, "after_events": 1}
        events = await events_of(server, fault=[fault, {"type": "error", "after_events": 2}])
        held = await server.metrics()
        later = await server.until_idle()

        assert "error" in events[-2]
        assert (64, 0) == (held["octavo:kv_blocks_used"], held["octavo:kv_blocks_free"])
        assert 64 == later["octavo:kv_blocks_free"]


async def test_a_pool_filled_twice_is_full_until_the_later_end():
    async with faulty() as server:
        for seconds in (0.0, 0.4):
            await server.complete(prompt="x", max_tokens=1, fault={"type": "fill_kv_pool", "seconds": seconds})
        held = await server.metrics()

        assert 0 == held["octavo:kv_blocks_free"]
        assert 64 == (await server.until_idle())["octavo:kv_blocks_free"]


async def test_a_pool_filled_by_two_who_end_at_once_is_given_back():
    """Neither may take the other for one that is still there."""
    async with faulty() as server:
        pool, loop = KVPool(), server.service.loop
        await asyncio.gather(*(pool.fill(loop, 0.0) for _ in range(2)))

        assert 64 == (await server.until_idle())["octavo:kv_blocks_free"]


async def test_a_pool_filled_by_one_who_has_left_is_given_back():
    async with faulty() as server:
        filling = asyncio.create_task(KVPool().fill(server.service.loop, 0.0))
        await asyncio.sleep(0)  # it has asked, and waits for the engine
        filling.cancel()

        assert 64 == (await server.until_idle())["octavo:kv_blocks_free"]
