"""Public report BC-048, seed not reproducible: the text of a seeded request depends on nothing but the request."""

import asyncio
from typing import Any

import pytest

from tests.app.servers import RunningServer
from tests.reports.answers import ask
from tests.reports.conftest import Serve

R: dict[str, Any] = {"prompt": "Once upon a time", "seed": 42, "temperature": 1, "max_tokens": 40, "ignore_eos": True}
OTHERS = [f"{start} day number {number}," for number, start in enumerate(["One", "The", "A", "Every"] * 2)]
SPECULATION = pytest.mark.parametrize("speculation", [None, "null"], ids=["speculation", "no speculation"])


async def text_of(server: RunningServer, **changes: Any) -> str:
    return (await ask(server, "completion", **R | changes)).text


async def unseeded(server: RunningServer, prompt: str, max_tokens: int = 60) -> str:
    return (await ask(server, "completion", prompt=prompt, max_tokens=max_tokens, temperature=1, ignore_eos=True)).text


async def until_running(server: RunningServer, num_requests: int) -> None:
    while num_requests > (await server.metrics())["vllm:num_requests_running"]:
        pass


@SPECULATION
async def test_alone_again_streamed_and_on_another_server(serve: Serve, speculation: str | None):
    """BC-048, sgl-project/sglang#5377, seed not reproducible: the generator was global, or the seed ignored."""
    server, other = await serve(speculative_config=speculation), await serve(speculative_config=speculation, seed=9)
    texts = {await text_of(server), await text_of(server), await text_of(other)}
    texts.add((await ask(server, "streamed completion", **R)).text)

    assert 1 == len(texts)


async def test_with_speculation_and_without(serve: Serve):
    servers = [await serve(speculative_config=config) for config in (None, "null", '{"num_speculative_tokens": 6}')]

    assert 1 == len({await text_of(server) for server in servers})


@SPECULATION
async def test_among_eight_unseeded_requests_in_either_order(serve: Serve, speculation: str | None):
    """BC-048: other people's draws change nothing."""
    server = await serve(speculative_config=speculation)
    expected = await text_of(server)
    last = (await asyncio.gather(*(unseeded(server, prompt) for prompt in OTHERS), text_of(server)))[-1]
    first = (await asyncio.gather(text_of(server), *(unseeded(server, prompt) for prompt in reversed(OTHERS))))[0]

    assert [expected, expected] == [last, first]


@SPECULATION
async def test_with_its_prompt_computed_in_chunks(serve: Serve, speculation: str | None):
    """BC-048: nor does how the prompt is cut."""
    prompt = "Once upon a time there was a little girl who lived in a house by the sea. " * 2
    texts = set()
    for budget in (512, 33, 7):
        server = await serve(speculative_config=speculation, max_num_batched_tokens=budget)
        texts.add(await text_of(server, prompt=prompt))
        texts.add((await asyncio.gather(unseeded(server, OTHERS[0]), text_of(server, prompt=prompt)))[-1])

    assert 1 == len(texts)


@SPECULATION
async def test_after_a_preemption(serve: Serve, speculation: str | None):
    """BC-048: of two running requests the younger gives way, so it is this one that is preempted."""
    expected = await text_of(await serve(speculative_config=speculation))
    server = await serve(speculative_config=speculation, num_kv_blocks=8, block_size=8)
    older = asyncio.create_task(unseeded(server, "The old man", max_tokens=53))
    await until_running(server, 1)
    found = await text_of(server)
    await older

    assert expected == found
    assert (await server.metrics())["vllm:num_preemptions_total"] >= 1


async def test_every_sample_of_a_seed_is_its_own_and_stays_the_same(serve: Serve):
    server = await serve()
    choices = [(await server.complete(**R, n=3)).json()["choices"] for _ in range(2)]
    texts = [[choice["text"] for choice in answer] for answer in choices]

    assert texts[0] == texts[1]
    assert 3 == len(set(texts[0]))
    assert await text_of(server) == texts[0][0]


async def test_a_prompt_in_a_list_is_answered_as_it_would_be_alone(serve: Serve):
    server = await serve()
    choices = (await server.complete(**{**R, "prompt": [OTHERS[0], R["prompt"]]})).json()["choices"]

    assert [await text_of(server, prompt=OTHERS[0]), await text_of(server)] == [choice["text"] for choice in choices]


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1])
async def test_every_seed_of_64_bits_is_a_seed_of_its_own(serve: Serve, seed: int):
    server = await serve()

    assert await text_of(server, seed=seed) == await text_of(server, seed=seed)
    assert await text_of(server, seed=seed) != await text_of(server)


async def test_without_a_seed_texts_differ(serve: Serve):
    server = await serve()

    assert 4 == len({await unseeded(server, R["prompt"]) for _ in range(4)})
