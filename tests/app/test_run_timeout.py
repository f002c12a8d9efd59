"""A request that has not ended in time is ended: a status while there is one to give, an event after.

Time is the event loop's own: it jumps when a test says so, and every timer that is due goes off.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.app.servers import Gate, RunningServer, live, make_engine

LIMIT_S = 20.0  # less than the test's client waits
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 9},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x", "max_output_tokens": 9},
    "/v1/messages": CHAT,
}
ENDPOINTS = [(path, {**body, "stream": stream}) for path, body in STREAMS.items() for stream in (False, True)]
ENDED = "vllm:request_success_total{finished_reason=%s}"


@pytest.fixture
def let_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def let_pass(seconds: float) -> None:
        loop = asyncio.get_running_loop()
        before = loop.time
        monkeypatch.setattr(loop, "time", lambda: before() + seconds)

    return let_pass


@asynccontextmanager
async def held(**fields: Any) -> AsyncIterator[tuple[RunningServer, Gate]]:
    """A server with the limit, every step of which has to be let through."""
    gate = Gate()
    async with live(make_engine(gate, **fields), request_timeout=LIMIT_S, **fields) as server, gate:
        yield server, gate


async def until_open(server: RunningServer, num_streams: int) -> None:
    while server.service.loop.num_open_streams != num_streams:
        await asyncio.sleep(0)


@pytest.mark.parametrize(("path", "body"), [*ENDPOINTS, ("/v1/embeddings", {"input": "x" * 9})])
async def test_before_the_first_byte_it_is_a_504_and_the_blocks_come_back(
    path: str, body: Any, let_pass: Callable[[float], None]
):
    async with held(max_num_batched_tokens=4) as (server, gate):  # no request is done in one step
        asked = asyncio.create_task(server.client.post(path, json=body))
        await gate.until_arrived(1)
        let_pass(LIMIT_S - 5)
        assert 1 == server.service.loop.num_open_streams
        let_pass(5)
        answer = await asked  # while the engine is still in that step
        gate.open()
        found = await server.until_idle()

    error = answer.json()["error"]
    expected = {"type": "timeout_error"} if path == "/v1/messages" else {"type": "server_error", "code": "timeout"}
    assert (504, expected) == (answer.status_code, {name: error[name] for name in expected})
    assert "within 20 s" in error["message"]
    assert (1, 0, 64) == (*(found[ENDED % reason] for reason in ("abort", "length")), found["octavo:kv_blocks_free"])


def is_openais_end(events: list[Any]) -> bool:
    return ["timeout", "[DONE]"] == [events[-2]["error"]["code"], events[-1]]


def is_responses_end(events: list[Any]) -> bool:
    return ["error", "timeout", "response.failed"] == [events[-2]["type"], events[-2]["code"], events[-1]["type"]]


def is_anthropics_end(events: list[Any]) -> bool:
    return ["error", "timeout_error"] == [events[-1]["type"], events[-1]["error"]["type"]]


ENDS = (is_openais_end, is_openais_end, is_responses_end, is_anthropics_end)


@pytest.mark.parametrize(("path", "is_right"), [*zip(STREAMS, ENDS, strict=True)])
async def test_in_mid_stream_it_is_an_error_event_and_no_finish_reason(
    path: str, is_right: Callable[[list[Any]], bool], let_pass: Callable[[float], None]
):
    async with held() as (server, gate):
        gate.let_through(2)
        async with server.client.stream("POST", path, json={**STREAMS[path], "stream": True}) as response:
            await gate.until_arrived(3)
            let_pass(LIMIT_S)
            events = [_read(line) async for line in response.aiter_lines() if line.startswith("data: ")]
        gate.open()
        found = await server.until_idle()

    assert 200 == response.status_code
    assert is_right(events)
    assert not {"length", "max_tokens", "incomplete"} & set(_values(events))
    assert (1, 0) == (found[ENDED % "abort"], found[ENDED % "length"])


def _read(line: str) -> Any:
    data = line.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


def _values(value: Any) -> list[Any]:
    """All that is neither object nor list within."""
    if not isinstance(value, dict | list):
        return [value]
    return [leaf for part in (value.values() if isinstance(value, dict) else value) for leaf in _values(part)]


async def test_who_waits_in_the_queue_is_timed_too_and_never_computed(let_pass: Callable[[float], None]):
    async with held(max_num_seqs=1) as (server, gate):
        bodies = [{"prompt": "1"}, {"prompt": "22"}]
        asked = [asyncio.create_task(server.complete(**body)) for body in bodies]
        await until_open(server, 2)
        let_pass(LIMIT_S)
        answers = [await task for task in asked]
        gate.open()
        found = await server.until_idle()

    assert [504] * 2 == [answer.status_code for answer in answers]
    assert found["vllm:prompt_tokens_total"] < 3


async def test_others_go_on_and_a_later_one_has_its_own_time(let_pass: Callable[[float], None]):
    async with held() as (server, gate):
        first = asyncio.create_task(server.complete(prompt="x"))
        await until_open(server, 1)
        let_pass(LIMIT_S / 2)
        second = asyncio.create_task(server.complete(prompt="x"))
        await until_open(server, 2)
        let_pass(LIMIT_S / 2)
        assert 504 == (await first).status_code
        gate.open()

        assert 200 == (await second).status_code


async def test_what_has_ended_in_time_may_be_read_later(
    let_pass: Callable[[float], None], caplog: pytest.LogCaptureFixture
):
    """The engine has long done its part; it is the events that are slow."""
    fault = {"type": "delay", "after_events": 1, "seconds": LIMIT_S}
    async with live(request_timeout=LIMIT_S, enable_fault_injection=True) as server:
        asked = asyncio.create_task(server.complete(prompt="x", script=["a", "b"], stream=True, fault=fault))
        while "fault injected" not in caplog.messages or server.service.loop.num_open_streams:
            await asyncio.sleep(0)
        let_pass(LIMIT_S)
        text = (await asked).text

    assert '"b"' in text
    assert "error" not in text
