"""The background loop: who is let in, who hears what, and what is left behind when somebody goes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.engine_loop import EngineLoop, Stream
from app.errors import ApiError
from core import (
    Engine,
    EngineDead,
    FinishReason,
    InvalidRequest,
    InvariantViolation,
    NewRequest,
    RequestOutput,
    SamplingParams,
)
from core.step import ModelRunnerOutput, SchedulerOutput
from tests.app.servers import Gate, make_engine


def new_request(name: str, *, num_prompt_tokens: int = 3, max_tokens: int = 4) -> NewRequest:
    prompt = tuple(range(num_prompt_tokens))
    return NewRequest(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens))


@asynccontextmanager
async def running(engine: Engine, **options: Any) -> AsyncIterator[EngineLoop]:
    loop = EngineLoop(engine, **{"max_queue": 100, **options})
    loop.start()
    try:
        yield loop
    finally:
        await loop.stop()


async def read_all(stream: Stream) -> list[RequestOutput]:
    return [output async for outputs in stream for output in outputs]


async def until_settled(loop: EngineLoop) -> None:
    while loop.is_busy:
        await asyncio.sleep(0)


async def test_every_sequence_of_a_stream_runs_to_its_end():
    async with running(make_engine()) as loop:
        outputs = await read_all(loop.submit([new_request("a"), new_request("b", max_tokens=2)]))

        assert {"a": 4, "b": 2} == {o.request_id: o.num_generated_tokens for o in outputs if o.is_finished}
        assert 0 == loop.num_open_streams


async def test_beyond_the_queue_a_request_is_refused_and_told_to_come_back():
    gate = Gate()
    async with running(make_engine(gate, max_num_seqs=1), max_queue=1) as loop, gate:
        loop.submit([new_request("runs")])
        await gate.until_arrived(1)
        loop.submit([new_request("waits")])

        with pytest.raises(ApiError) as refusal:
            loop.submit([new_request("too many")])

        assert (503, "queue_full") == (refusal.value.status, refusal.value.code)
        assert "Retry-After" in refusal.value.headers
        assert 1 == loop.num_rejections
        gate.open()


async def test_places_in_the_batch_count_beside_the_queue():
    """Requests that come at once to an idle server do not wait, so they are no queue."""
    async with running(make_engine(max_num_seqs=3), max_queue=0) as loop:
        streams = [loop.submit([new_request(name)]) for name in "abc"]

        with pytest.raises(ApiError, match="waiting"):
            loop.submit([new_request("d")])
        for stream in streams:
            assert (await read_all(stream))[-1].is_finished


async def test_of_several_sequences_all_are_taken_or_none():
    async with running(make_engine(max_num_seqs=2), max_queue=1) as loop:
        loop.submit([new_request("a"), new_request("b")])

        with pytest.raises(ApiError):
            loop.submit([new_request("c"), new_request("d")])
        assert 2 == loop.num_in_inbox


async def test_more_sequences_than_could_ever_wait_are_the_callers_mistake():
    async with running(make_engine(max_num_seqs=2), max_queue=1) as loop:
        with pytest.raises(InvalidRequest, match="limit is 3"):
            loop.submit([new_request(name) for name in "abcd"])


async def test_a_closed_stream_frees_its_blocks_without_another_step():
    gate = Gate()
    engine = make_engine(gate)
    async with running(engine) as loop, gate:
        stream = loop.submit([new_request("a", max_tokens=40)])
        gate.let_through(1)
        await anext(stream)
        await gate.until_arrived(2)

        stream.close()
        gate.let_through(1)  # the step that was under way
        await until_settled(loop)

        assert 2 == gate.num_arrived
        assert (0, 0, 64) == (engine.stats.num_running, engine.stats.num_waiting, engine.stats.kv_blocks_free)


async def test_a_request_left_while_it_waits_is_never_computed():
    gate = Gate()
    engine = make_engine(gate, max_num_seqs=1)
    async with running(engine) as loop, gate:
        first = loop.submit([new_request("first", num_prompt_tokens=3)])
        await gate.until_arrived(1)
        queued = loop.submit([new_request("queued", num_prompt_tokens=5)])
        gate.let_through(1)
        await gate.until_arrived(2)  # by now the engine has taken it in
        fresh = loop.submit([new_request("fresh", num_prompt_tokens=7)])
        queued.close()
        fresh.close()
        gate.open()
        await read_all(first)
        await until_settled(loop)

        assert 3 == engine.stats.num_prompt_tokens
        assert {"abort": 2, "length": 1} == {k: v for k, v in engine.stats.finished.items() if v}


async def test_a_reader_that_stops_reading_is_aborted_and_others_go_on():
    engine = make_engine()
    async with running(engine, max_buffered=5) as loop:
        slow = loop.submit([new_request("slow", max_tokens=200)])
        outputs = await read_all(loop.submit([new_request("brisk", max_tokens=50)]))
        await until_settled(loop)

        assert FinishReason.LENGTH is outputs[-1].finish_reason
        assert 1 == engine.stats.finished["abort"]
        with pytest.raises(ApiError, match="not read"):
            await read_all(slow)


async def test_a_stream_without_news_gives_signs_of_life():
    gate = Gate()
    async with running(make_engine(gate), idle_s=0) as loop, gate:
        stream = loop.submit([new_request("a")])

        assert [] == await anext(stream)
        assert [] == await anext(stream)
        gate.open()
        assert 4 == (await read_all(stream))[-1].num_generated_tokens


async def test_a_sign_of_life_is_due_when_nothing_was_shown_although_something_came():
    now = 0.0
    gate = Gate()
    async with running(make_engine(gate), idle_s=15, clock=lambda: now) as loop, gate:
        stream = loop.submit([new_request("a", max_tokens=3)])
        gate.let_through(1)
        assert 1 == len(await anext(stream))
        now = 15.0
        assert [] == await anext(stream)

        now = 29.0
        gate.let_through(1)
        assert 1 == len(await anext(stream))
        stream.mark_shown()
        now = 43.0
        gate.let_through(1)
        assert 1 == len(await anext(stream))


def break_down(plan: SchedulerOutput) -> ModelRunnerOutput:
    raise InvariantViolation("a book does not balance")


async def test_when_the_engine_dies_streams_hear_of_it_and_nothing_more_is_taken():
    deaths: list[str] = []
    async with running(make_engine(break_down), on_death=lambda: deaths.append("died")) as loop:
        stream = loop.submit([new_request("a")])

        with pytest.raises(EngineDead):
            await read_all(stream)
        assert loop.is_dead
        assert ["died"] == deaths
        with pytest.raises(EngineDead):
            loop.submit([new_request("b")])


async def test_a_fault_of_the_loop_itself_is_the_engines_death_too(monkeypatch: pytest.MonkeyPatch):
    async with running(make_engine()) as loop:
        stream = loop.submit([new_request("a")])
        monkeypatch.setattr(stream, "put", None)

        with pytest.raises(EngineDead):
            await read_all(stream)
        assert loop.is_dead


def fail_on_long_prompts(plan: SchedulerOutput) -> ModelRunnerOutput:
    from core.step import count_only

    if any(s.request.num_prompt_tokens > 3 for s in plan.scheduled):
        raise ValueError("too long for me")
    return count_only(plan)


async def test_a_request_that_cannot_be_computed_fails_alone():
    async with running(make_engine(fail_on_long_prompts)) as loop:
        bad, good = loop.submit([new_request("bad", num_prompt_tokens=4)]), loop.submit([new_request("good")])

        assert FinishReason.ERROR is (await read_all(bad))[-1].finish_reason
        assert FinishReason.LENGTH is (await read_all(good))[-1].finish_reason
        assert not loop.is_dead


async def test_what_the_engine_refuses_is_told_to_its_stream_and_its_siblings_end():
    """The id is in use: the service never does that, so the engine is the first to notice."""
    engine = make_engine()
    async with running(engine) as loop:
        with pytest.raises(ValueError, match="twice"):
            await read_all(loop.submit([new_request("twice"), new_request("sibling"), new_request("twice")]))
        await until_settled(loop)

        assert 0 == engine.stats.kv_blocks_used
        assert not loop.is_dead


async def test_drain_waits_for_open_streams_and_takes_nothing_new():
    async with running(make_engine()) as loop:
        reading = asyncio.create_task(read_all(loop.submit([new_request("a", max_tokens=100)])))
        await loop.drain(timeout_s=30)

        assert 100 == (await reading)[-1].num_generated_tokens
        with pytest.raises(ApiError) as refusal:
            loop.submit([new_request("b")])
        assert (503, "shutting_down") == (refusal.value.status, refusal.value.code)


async def test_drain_cuts_what_is_still_open_in_the_end():
    gate = Gate()
    async with running(make_engine(gate)) as loop, gate:
        stream = loop.submit([new_request("a")])
        await loop.drain(timeout_s=0)

        with pytest.raises(ApiError, match="shutting down"):
            await anext(stream)
        gate.open()


async def test_a_call_that_waits_when_the_engine_dies_is_told():
    gate = Gate()

    def break_down(plan: SchedulerOutput) -> ModelRunnerOutput:
        gate(plan)
        raise InvariantViolation("a block is lost")

    async with running(make_engine(break_down)) as loop, gate:
        loop.submit([new_request("a")])
        await gate.until_arrived(1)
        call = asyncio.create_task(loop.call(Engine.describe_kv))
        await asyncio.sleep(0)
        gate.open()

        with pytest.raises(EngineDead):
            await call


async def test_a_call_that_waits_when_the_server_stops_is_told():
    gate = Gate()
    async with running(make_engine(gate)) as loop, gate:
        loop.submit([new_request("a")])
        await gate.until_arrived(1)
        call = asyncio.create_task(loop.call(Engine.describe_kv))
        await asyncio.sleep(0)
        await loop.drain(timeout_s=0)

        with pytest.raises(ApiError, match="shutting down"):
            await call
