"""Public report BC-060, preempted request resumes with wrong or incomplete output: nobody can tell that it happened."""

import asyncio
from typing import Any

import pytest

from tests.app.servers import RunningServer
from tests.reports.answers import WAYS, Answer, ask
from tests.reports.conftest import Serve

# 16 tokens in and 96 out: 112 tokens, 7 blocks of 16, the last token's slot included.
PROMPTS = ["Once upon a time", "The little robot", "In the old house", "A cat and a bird"]
MAX_TOKENS = 96
SAMPLING = pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1, "seed": 11}], ids=["greedy", "seeded"]
)
SPECULATION = pytest.mark.parametrize("speculation", [None, "null"], ids=["speculation", "no speculation"])


async def answers(server: RunningServer, way: str, prompts: list[str], **body: Any) -> list[Answer]:
    body |= {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    return list(await asyncio.gather(*(ask(server, way, prompt=prompt, **body) for prompt in prompts)))


async def preemptions(server: RunningServer) -> float:
    return (await server.metrics())["vllm:num_preemptions_total"]


@SAMPLING
@SPECULATION
async def test_two_streams_that_outgrow_the_pool_say_what_they_say_alone(
    serve: Serve, sampling: dict[str, Any], speculation: str | None
):
    """BC-060, vllm-project/vllm#16832, as reported: 10 blocks of 16, two streams that grow to 7 blocks each."""
    alone = await serve(speculative_config=speculation)
    expected = [(await answers(alone, "completion", [prompt], **sampling))[0].text for prompt in PROMPTS[:2]]
    server = await serve(speculative_config=speculation, num_kv_blocks=10, block_size=16)
    found = await answers(server, "streamed completion", PROMPTS[:2], **sampling)

    assert 0 == await preemptions(alone)
    assert await preemptions(server) >= 1
    # The pieces, joined, are the text: none came twice, none is missing.
    assert expected == ["".join(answer.pieces) for answer in found]
    assert [(MAX_TOKENS, "length")] * 2 == [(answer.num_tokens, answer.finish_reason) for answer in found]


@SAMPLING
@pytest.mark.parametrize("way", WAYS)
async def test_four_requests_in_turn_give_way_and_none_is_harmed(serve: Serve, sampling: dict[str, Any], way: str):
    alone = await serve()
    expected = [(await answers(alone, way, [prompt], **sampling))[0].text for prompt in PROMPTS]
    server = await serve(num_kv_blocks=11, block_size=16)
    found = await answers(server, way, PROMPTS, **sampling)

    assert await preemptions(server) >= 2
    assert expected == [answer.text for answer in found]
    assert {MAX_TOKENS} == {answer.num_tokens for answer in found}


async def test_token_ids_and_logprobs_are_those_of_an_undisturbed_run(serve: Serve):
    body: dict[str, Any] = {
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
    }
    alone = await serve()
    expected = [(await alone.complete(prompt=prompt, **body)).json()["choices"] for prompt in PROMPTS[:2]]
    server = await serve(num_kv_blocks=10, block_size=16)
    found = await asyncio.gather(*(server.complete(prompt=prompt, **body) for prompt in PROMPTS[:2]))

    assert await preemptions(server) >= 1
    assert expected == [response.json()["choices"] for response in found]
    assert MAX_TOKENS == len(expected[0][0]["token_ids"])


async def test_recomputed_tokens_are_counted_once_and_every_block_comes_back(serve: Serve):
    server = await serve(num_kv_blocks=10, block_size=16)
    await answers(server, "completion", PROMPTS, temperature=0)
    after = await server.until_idle()

    assert after["vllm:num_preemptions_total"] >= 1
    assert sum(map(len, PROMPTS)) == after["vllm:prompt_tokens_total"]
    assert len(PROMPTS) * MAX_TOKENS == after["vllm:generation_tokens_total"]
    assert after["vllm:num_preemptions_total"] == after["vllm:request_num_preemptions_sum"]
    assert after["octavo:kv_blocks"] == after["octavo:kv_blocks_free"]
