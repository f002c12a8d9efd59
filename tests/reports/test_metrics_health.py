"""Public reports on metrics that count wrongly or grow without limit, and on probes that lie or do not answer."""

import asyncio
import json
import random
import threading
from typing import Any

import pytest
from pydantic import BaseModel

from app.schemas.base import dumped
from core import Engine, InvariantViolation
from core.step import ModelRunnerOutput, SchedulerOutput, count_only
from tests.app.servers import in_process, make_engine
from tests.reports.conftest import Serve, scripted

HELLO = [{"role": "user", "content": "Hi"}]
FINISHED = "vllm:request_success_total{finished_reason=%s}"


async def test_bc_075_aborted_requests_are_counted(serve: Serve):
    """BC-075, vllm-project/vllm#31503: the abort label stayed at 0 although clients left."""
    server = await serve(live=True)
    for _ in range(3):
        body = {"prompt": "p", "max_tokens": 1000, "stream": True, "ignore_eos": True}
        async with server.client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_lines())
    for max_tokens in (9, 9, 1):
        await server.complete(prompt="p", max_tokens=max_tokens, **scripted("a", "b"))
    while (found := await server.until_idle())[FINISHED % "abort"] < 3:
        pass

    counted = {reason: found[FINISHED % reason] for reason in ("abort", "stop", "length", "error", "repetition")}
    assert {"abort": 3, "stop": 2, "length": 1, "error": 0, "repetition": 0} == counted


async def test_bc_077_what_a_preemption_makes_compute_again_is_no_hit(serve: Serve):
    """BC-077, vllm-project/vllm#25780: random prompts showed a hit rate of 30 %, all of it recomputed tokens."""
    server = await serve(block_size=16, num_kv_blocks=20, max_num_seqs=8)
    letters = random.Random(7)
    prompts = ["".join(letters.choices("abcdefghij", k=letters.randint(17, 60))) for _ in range(50)]
    answers = await asyncio.gather(
        *(server.complete(prompt=prompt, max_tokens=40, ignore_eos=True, temperature=0) for prompt in prompts)
    )
    usages = [answer.json()["usage"] for answer in answers]
    found = await server.until_idle()

    assert found["vllm:num_preemptions_total"] >= 1
    assert found["octavo:recomputed_tokens_total"] >= 1
    assert 0 == found["vllm:prefix_cache_hits_total"]
    assert {0} == {usage["prompt_tokens_details"]["cached_tokens"] for usage in usages}
    assert sum(map(len, prompts)) == found["vllm:prompt_tokens_total"] == sum(u["prompt_tokens"] for u in usages)


async def test_bc_080_paths_that_nobody_serves_make_no_series(serve: Serve):
    """BC-080, sgl-project/sglang#31193: each of a scanner's paths became a label, and /metrics grew without limit."""
    server = await serve()
    await server.client.get("/nowhere")
    before = await server.metrics()
    numbers = random.Random(0)
    for i in range(1000):
        path = numbers.choice(["/../", "/${jndi:x}", "/%2e%2e/", "/v1/", "/" + "y" * 500]) + str(numbers.random())
        assert 404 == (await server.client.get(f"{path}/{i}")).status_code
    after = await server.metrics()

    assert set(before) == set(after)
    assert any("handler=other" in name for name in after)
    other = "http_requests_total{handler=other,method=GET,status=4xx}"
    assert 1000 == after[other] - before[other]


async def test_bc_082_a_dead_engine_shows_in_every_answer():
    """BC-082, kserve/kserve#6259: probes heard 200 after the engine had died, and requests hung."""
    engine, steps = _mortal_engine(num_steps=5)
    async with in_process(engine) as server:
        body = {"prompt": "p", "max_tokens": 50, "stream": True}
        streams = await asyncio.gather(*(server.complete(**body) for _ in range(3)))
        probes = [await server.client.get(path) for path in ("/health", "/ready", "/ping")]
        new = [await server.complete(prompt="p"), await server.chat(messages=HELLO, stream=True)]

    assert 5 == len(steps)
    for stream in streams:
        *_, error, done, _ = stream.text.split("\n\n")
        assert ("engine_dead", "data: [DONE]") == (json.loads(error.removeprefix("data: "))["error"]["code"], done)
    assert [503] * 5 == [response.status_code for response in (*probes, *new)]


def _mortal_engine(num_steps: int) -> tuple[Engine, list[int]]:
    """An engine whose books stop balancing after so many steps."""
    steps: list[int] = []

    def execute(plan: SchedulerOutput) -> ModelRunnerOutput:
        if len(steps) == num_steps:
            raise InvariantViolation("a block is lost")
        steps.append(plan.step)
        return count_only(plan)

    return make_engine(execute), steps


@pytest.mark.parametrize(("size", "status"), [(5_000_000, 400), (27_000_000, 413)])
async def test_bc_084_a_huge_prompt_is_refused_for_its_size(serve: Serve, size: int, status: int):
    """BC-084, vllm-project/vllm#24910: the health probe did not answer for 29 s while 27 MB were prepared."""
    server = await serve()
    response = await server.chat(messages=[{"role": "user", "content": "x" * size}])

    assert status == response.status_code
    if status == 400:
        assert "context_length_exceeded" == response.json()["error"]["code"]


async def test_bc_084_while_a_prompt_is_cut_into_tokens_everybody_else_is_served(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    """BC-084: cutting waits here until a probe has been answered and a stream has ended."""
    server = await serve()
    is_served, tokenizer = threading.Event(), server.engine.tokenizer
    encode = tokenizer.encode

    def slow_encode(text: str, **options: Any) -> list[int]:
        assert is_served.wait(60) or "long" not in text
        return encode(text, **options)

    stream = asyncio.create_task(server.complete(prompt="p", max_tokens=64, ignore_eos=True, stream=True))
    while (await server.metrics())["vllm:num_requests_running"] == 0:
        pass
    monkeypatch.setattr(tokenizer, "encode", slow_encode)
    long = asyncio.create_task(server.complete(prompt="a long one", max_tokens=1))
    text = (await stream).text
    probe = await server.client.get("/health")
    assert not long.done()
    is_served.set()

    assert text.endswith("data: [DONE]\n\n")
    assert [200, 200] == [probe.status_code, (await long).status_code]


@pytest.mark.parametrize("asked", [{"logprobs": 2}, {"prompt_logprobs": 2}, {"echo": True, "logprobs": 0}])
async def test_bc_084_nor_does_anybody_wait_while_many_log_probabilities_are_written_down(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
):
    """BC-084: a hundred thousand of them hold up the event loop for a second."""
    server = await serve()
    writers: list[threading.Thread] = []

    def noting_dumped(answer: BaseModel) -> bytes:
        writers.append(threading.current_thread())
        return dumped(answer)

    monkeypatch.setattr("app.chunks.dumped", noting_dumped)
    answer = await server.complete(prompt="p", max_tokens=1, **asked)

    assert 200 == answer.status_code
    assert 1 == len(writers)
    assert threading.main_thread() not in writers
