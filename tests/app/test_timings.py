"""What responses tell of a request's times, where the server is told to."""

import json
from typing import Any

import pytest

from app.timings import timings
from core import RequestTimes
from tests.app.servers import RunningServer, in_process, make_engine

MESSAGES = [{"role": "user", "content": "x"}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
FIELDS = {"queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms", "tokens_per_second"}


def test_the_first_token_counts_from_the_first_step_and_throughput_too():
    """As in vLLM: 3 tokens, queued for half a second, prefilled for a quarter, decoded for one."""
    found = timings(RequestTimes(10.5, 10.75, 11.75), arrival_s=10.0, num_tokens=3)

    expected = {"queue_time_ms": 500, "time_to_first_token_ms": 250, "generation_time_ms": 1000}
    assert {**expected, "mean_itl_ms": 500, "tokens_per_second": 3 / 1.25} == found


@pytest.mark.parametrize(
    ("times", "num_tokens", "names"),
    [
        (None, 0, set()),
        (RequestTimes(2.0, None, None), 0, {"queue_time_ms"}),
        (RequestTimes(2.0, 3.0, 3.0), 1, FIELDS - {"mean_itl_ms"}),
        (RequestTimes(2.0, 2.0, 2.0), 1, FIELDS - {"mean_itl_ms", "tokens_per_second"}),
    ],
)
def test_what_there_is_nothing_to_say_of_is_left_out(times: RequestTimes | None, num_tokens: int, names: set[str]):
    assert names == timings(times, arrival_s=1.0, num_tokens=num_tokens).keys()


def chunks(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def ask_all(server: RunningServer, **fields: Any) -> list[list[dict[str, Any]]]:
    """Completions and chat, whole and streamed; a whole answer as the only one of its chunks."""
    asked = {"max_tokens": 3, "include_metrics": True, **fields}
    whole = [await server.complete(prompt="x", **asked), await server.chat(messages=MESSAGES, **asked)]
    asked |= USAGE
    streamed = [await server.complete(prompt="x", **asked), await server.chat(messages=MESSAGES, **asked)]
    return [*([answer.json()] for answer in whole), *(chunks(answer.text) for answer in streamed)]


async def test_the_last_chunk_has_them_and_no_other():
    async with in_process(enable_per_request_metrics=True) as server:
        for answers in await ask_all(server):
            *others, last = answers

            assert FIELDS == last["metrics"].keys()
            assert all(value >= 0 for value in last["metrics"].values())
            assert not any("metrics" in chunk for chunk in others)


async def test_of_several_sequences_there_is_nothing_to_say():
    async with in_process(enable_per_request_metrics=True) as server:
        for answers in await ask_all(server, n=2):
            assert answers[-1]["metrics"] is None


async def test_they_are_differences_of_the_engines_own_clock():
    now_s = iter(range(10**6))
    engine = make_engine(clock=lambda: float(next(now_s)))
    async with in_process(engine, enable_per_request_metrics=True) as server:
        told = (await server.complete(prompt="x", max_tokens=3)).json()["metrics"]

    assert told["generation_time_ms"] == 2 * told["mean_itl_ms"] >= 2000


async def test_unless_the_server_is_told_to_a_response_has_none():
    async with in_process(strict_fields=True) as server:
        for answers in await ask_all(server):
            assert not any("metrics" in chunk for chunk in answers)
