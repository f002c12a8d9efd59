"""Public reports on shared KV memory: full hits, long prompts beside streams, books that balance, keys that collide."""

import asyncio
from typing import Any

import httpx
import pytest

from app.factory import load
from core.step import ModelRunnerOutput, SchedulerOutput
from tests.app.servers import Gate, RunningServer, in_process, make_engine, make_settings
from tests.reports.conftest import Serve

STORY = "Once upon a time there was a girl who lived by the sea. Every day she walked along the beach with her dog. "
SALT = "T1"


def usage_of(response: httpx.Response) -> tuple[int, int]:
    """(prompt tokens, cached tokens)"""
    assert 200 == response.status_code, response.text
    usage = response.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def text_of(response: httpx.Response) -> str:
    text: str = response.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("speculation", [None, "null"], ids=["speculation", "no speculation"])
@pytest.mark.parametrize("num_tokens", [16, 32, 48])
async def test_bc_062_a_prompt_that_is_wholly_cached_is_answered_as_it_was(
    serve: Serve, num_tokens: int, speculation: str | None
):
    """BC-062, GeeeekExplorer/nano-vllm#144: with nothing left to compute the prefill was empty, and failed."""
    server = await serve(block_size=16, speculative_config=speculation)
    body: dict[str, Any] = {"prompt": STORY[:num_tokens], "temperature": 0, "max_tokens": 8}
    first = await server.complete(**body)
    again = await server.complete(**body)
    together = await asyncio.gather(server.complete(**body), server.complete(**body))

    assert (num_tokens, 0) == usage_of(first)
    assert [(num_tokens, num_tokens - 16)] * 3 == [usage_of(response) for response in (again, *together)]
    assert [text_of(first)] * 3 == [text_of(response) for response in (again, *together)]


async def test_bc_062_two_cold_ones_at_once(serve: Serve):
    """BC-062, fully cached prompt leaves zero tokens to compute."""
    server = await serve(block_size=16)
    body: dict[str, Any] = {"prompt": STORY[:32], "temperature": 0, "max_tokens": 8}
    together = await asyncio.gather(server.complete(**body), server.complete(**body))

    assert [(32, 0), (32, 16)] == sorted(usage_of(response) for response in together)
    assert 1 == len({text_of(response) for response in together})


async def test_bc_064_a_stream_gets_a_token_in_every_step_of_a_long_prompt():
    """BC-064, vllm-project/vllm#1026: while a long prompt was processed no running request got a token."""
    steps: list[dict[int, bool]] = []  # by prompt length: is a token yielded?
    gate = Gate()

    def execute(plan: SchedulerOutput) -> ModelRunnerOutput:
        steps.append({s.request.num_prompt_tokens: s.yields_token for s in plan.scheduled})
        assert plan.num_tokens <= 256
        return gate(plan)

    engine = make_engine(execute, max_num_batched_tokens=256, num_kv_blocks=600, block_size=16)
    async with in_process(engine) as server, gate:
        stream = asyncio.create_task(server.complete(prompt="S", max_tokens=100, ignore_eos=True, stream=True))
        await gate.until_arrived(1)
        long_prompt = asyncio.create_task(server.complete(prompt=[7] * 4000, max_tokens=1))
        while (await server.metrics())["vllm:num_requests_waiting"] == 0:
            pass
        gate.open()
        assert (4000, 0) == usage_of(await long_prompt)
        assert 200 == (await stream).status_code

    chunks = [step for step in steps if 4000 in step]
    assert -(-4000 // 255) == len(chunks)
    assert [True] * len(chunks) == [step[1] for step in chunks]


async def leave_early(server: RunningServer, prompt: str) -> None:
    """A client that goes away after the first token."""
    body = {"prompt": prompt, "max_tokens": 60, "stream": True, "ignore_eos": True}
    async with server.client.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_bytes())


async def mixed_load(server: RunningServer) -> None:
    """Shared prefixes, three samples of one prompt, clients that leave, more than fits."""
    body: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    await asyncio.gather(
        *(server.complete(prompt=f"{STORY[:40]}{i}", **body) for i in range(3)),
        server.complete(prompt=STORY[:25], n=3, **body),
        *(leave_early(server, f"{STORY[:20]}{i}") for i in range(2)),
    )


async def test_bc_071_books_balance_at_idle_each_time(serve: Serve):
    """BC-071, sgl-project/sglang#35270: cached pages were counted twice and an idle check stopped the server.

    Here cached is part of free, so that at idle free is all, and after a reset nothing is cached.
    """
    server = await serve(live=True, num_kv_blocks=12, block_size=8, preemption_mode="swap", speculative_config="null")
    names = [f"octavo:kv_blocks{state}" for state in ("", "_free", "_used", "_shared")]
    for _ in range(20):
        await mixed_load(server)
        found = await server.until_idle()
        assert [12, 12, 0, 0] == [found[name] for name in names]
        assert 0 < found["octavo:kv_blocks_cached"] <= 12
        slots = [found[f"octavo:kv_slots{{state={state}}}"] for state in ("token", "waste", "cached", "free")]
        assert [0, 0, 96] == [*slots[:2], sum(slots)]

    assert found["vllm:num_preemptions_total"] > 0
    assert 40 == found["vllm:request_success_total{finished_reason=abort}"]
    assert 200 == (await server.client.post("/reset_prefix_cache")).status_code
    after = await server.metrics()
    assert [12, 0] == [after["octavo:kv_blocks_free"], after["octavo:kv_blocks_cached"]]
    assert 96 == after["octavo:kv_slots{state=free}"]
    assert (41, 0) == usage_of(await server.complete(prompt=f"{STORY[:40]}0", max_tokens=1))


async def test_bc_072_a_user_a_salt_and_a_key_of_the_same_name_are_three_things(serve: Serve):
    """BC-072, vllm-project/vllm#44701: an adapter's name and a cache salt gave one hash, and tenants hit each other's.

    A user is nobody's tenant and separates nothing, so that who names none hits what a user computed.
    """
    engine = load(make_settings())
    async with in_process(engine, api_key=(SALT, "other")) as server:

        async def cached(key: str = "other", **fields: str) -> int:
            body = {"prompt": STORY[:64], "max_tokens": 1, **fields}
            headers = {"Authorization": f"Bearer {key}"}
            return usage_of(await server.client.post("/v1/completions", json=body, headers=headers))[1]

        assert [0, 0, 0] == [await cached(user=SALT), await cached(cache_salt=SALT), await cached(key=SALT)]
        assert [48, 48, 48] == [await cached(user=SALT), await cached(cache_salt=SALT), await cached(key=SALT)]
        assert 48 == await cached()


async def test_bc_072_an_alias_of_the_model_shares_with_the_model_and_not_with_a_salt_of_its_name(serve: Serve):
    """BC-072, prefix-cache keys of different kinds collide."""
    server = await serve(served_model_name=("octavo-tiny", SALT))

    async def cached(**fields: str) -> int:
        return usage_of(await server.complete(prompt=STORY[:64], max_tokens=1, **fields))[1]

    assert [0, 0] == [await cached(model=SALT), await cached(cache_salt=SALT)]
    assert [48, 48, 48] == [await cached(model=SALT), await cached(cache_salt=SALT), await cached()]
