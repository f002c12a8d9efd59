"""Public reports on requests that crash or hang a server although they should simply be refused."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.app.servers import RunningServer
from tests.reports.conftest import Serve, scripted

HELLO = [{"role": "user", "content": "Hi"}]


async def post_literal(server: RunningServer, literals: str) -> httpx.Response:
    """A chat request whose last fields are written as they stand, for what JSON libraries would not write."""
    content = f'{{"messages": {json.dumps(HELLO)}, "max_tokens": 1, {literals}}}'
    headers = {"content-type": "application/json"}
    return await server.client.post("/v1/chat/completions", content=content, headers=headers)


async def assert_alive(server: RunningServer) -> None:
    assert 200 == (await server.chat(messages=HELLO, max_tokens=1)).status_code
    assert 200 == (await server.client.get("/health")).status_code


async def test_bc_035_a_seed_outside_64_bits_is_refused(serve: Serve):
    """BC-035, vllm-project/vllm#4529: a seed of 2**64 passed validation and failed in the worker."""
    server = await serve()
    for seed in ("18446744073709551616", "9223372036854775808", "-9223372036854775809", "1.5", '"abc"', "true"):
        response = await post_literal(server, f'"seed": {seed}')
        assert (400, "seed") == (response.status_code, response.json()["error"]["param"]), seed

    for seed in ("-5", "0", "9223372036854775807", "-9223372036854775808"):
        assert 200 == (await post_literal(server, f'"seed": {seed}')).status_code, seed
    await assert_alive(server)


@pytest.mark.parametrize(
    ("name", "bad", "bounds"),
    [
        ("temperature", ["999999", "-0.1", "NaN", "Infinity", "2.0001"], ["0", "2"]),
        ("top_p", ["-1", "0", "1.5", "NaN"], ["1", "0.0001"]),
        ("repetition_penalty", ["0", "-1", "NaN"], ["0.0001", "2"]),
        ("presence_penalty", ["3", "-2.5", "NaN"], ["-2", "2"]),
        ("frequency_penalty", ["3", "-2.5", "NaN"], ["-2", "2"]),
        ("min_p", ["-0.1", "1.1", "NaN"], ["0", "1"]),
        ("top_k", ["-2", "1.5"], ["-1", "0", "1"]),
        ("n", ["0", "-1", "129", "1.0"], ["1"]),
        ("max_completion_tokens", ["-1", "0", "1.5"], ["1"]),
        ("max_tokens", ["-1", "0"], ["1"]),
    ],
)
async def test_bc_037_sampling_fields_are_held_to_their_ranges(
    serve: Serve, name: str, bad: list[str], bounds: list[str]
):
    """BC-037, ggml-org/llama.cpp#19367: extreme floats hung or crashed the server."""
    server = await serve()
    for value in bad:
        response = await post_literal(server, f'"{name}": {value}')
        assert (400, name) == (response.status_code, response.json()["error"]["param"]), value
        assert name in response.json()["error"]["message"]

    for value in bounds:
        assert 200 == (await post_literal(server, f'"{name}": {value}')).status_code, value
    await assert_alive(server)


async def test_bc_038_token_ids_outside_the_vocabulary_are_refused(serve: Serve):
    """BC-038, vllm-project/vllm#9634: ids beyond the embedding table ended the engine."""
    server = await serve()
    vocab_size = server.engine.model_config.vocab_size
    running = asyncio.create_task(server.complete(prompt="p", **scripted(*("ab" * 50)), max_tokens=200))
    bad: list[Any] = [[vocab_size], [-1], [2**63], [1.5], [True], [[1, 2], [999999999]]]
    for prompt in bad:
        response = await server.complete(prompt=prompt, max_tokens=1)
        assert (400, "prompt") == (response.status_code, response.json()["error"]["param"]), prompt

    assert 200 == (await server.complete(prompt=[vocab_size - 1], max_tokens=1)).status_code
    assert "ab" * 50 == (await running).json()["choices"][0]["text"]


async def test_bc_039_an_empty_prompt_is_refused_and_blocks_nothing(serve: Serve):
    """BC-039, vllm-project/vllm#7746: a prompt without tokens killed the engine; this model's tokenizer adds no BOS."""
    server = await serve()
    for prompt in ("", [""], [], [[]], ["ok", ""]):
        response = await server.complete(prompt=prompt, max_tokens=1)
        assert (400, "prompt") == (response.status_code, response.json()["error"]["param"]), prompt
    assert 400 == (await server.chat(messages=[])).status_code

    await assert_alive(server)


async def test_bc_044_the_context_may_be_filled_and_not_passed(serve: Serve):
    """BC-044, vllm-project/vllm#23683: a prompt as long as the context tripped an assertion in the engine."""
    server = await serve(max_model_len=16)
    full = await server.complete(prompt="x" * 15, max_tokens=1)
    assert (1, "length") == (full.json()["usage"]["completion_tokens"], full.json()["choices"][0]["finish_reason"])

    for num_prompt_tokens, max_tokens in ((15, 2), (16, 1), (17, 1)):
        response = await server.complete(prompt="x" * num_prompt_tokens, max_tokens=max_tokens)
        error = response.json()["error"]
        assert (400, "context_length_exceeded") == (response.status_code, error["code"])
        assert "maximum context length is 16 tokens" in error["message"]
    await server.until_idle()
    assert 200 == (await server.complete(prompt="x", max_tokens=1)).status_code


async def test_bc_044_without_a_limit_a_chat_gets_the_room_that_is_left(serve: Serve):
    """BC-044, boundary of the context length crashes the runner."""
    template = "{{ messages[0].content }}"
    server = await serve(max_model_len=16, chat_template=template)
    body = (await server.chat(messages=[{"role": "user", "content": "x" * 15}])).json()

    assert (15, 1) == (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
    assert "length" == body["choices"][0]["finish_reason"]


async def test_bc_032_a_bias_for_a_token_outside_the_vocabulary_is_refused(serve: Serve):
    """BC-032, vllm-project/vllm#16529: one such request ended the engine for everybody."""
    server = await serve()
    vocab_size = server.engine.model_config.vocab_size
    running = asyncio.create_task(server.complete(prompt="p", **scripted(*("ab" * 50)), max_tokens=200))
    for bias in ({str(vocab_size + 5): -100, "3": 5}, {"-1": 1}, {"abc": 1}):
        response = await server.chat(messages=HELLO, logit_bias=bias)
        assert (400, "logit_bias") == (response.status_code, response.json()["error"]["param"]), bias

    assert "ab" * 50 == (await running).json()["choices"][0]["text"]
    await assert_alive(server)


@pytest.mark.parametrize("speculation", [None, "null", '{"method": "ngram", "num_speculative_tokens": 3}'])
@pytest.mark.parametrize("n", [1, 2])
async def test_bc_033_a_bias_is_felt(serve: Serve, speculation: str | None, n: int):
    """BC-033, sgl-project/sglang#6171: tokens with a bias of -100 came all the same."""
    server = await serve(speculative_config=speculation)
    asked: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 5, "return_token_ids": True}
    usual = (await server.complete(**asked)).json()["choices"][0]["token_ids"]
    never = (await server.complete(**asked, n=n, logit_bias={str(usual[0]): -100})).json()["choices"]
    always = (await server.complete(**asked, n=n, logit_bias={"90": 100})).json()["choices"]
    too_much = await server.complete(**asked, logit_bias={"90": 101})

    assert all(usual[0] not in choice["token_ids"] for choice in never)
    assert [[90] * 5] * n == [choice["token_ids"] for choice in always]
    assert (400, "logit_bias") == (too_much.status_code, too_much.json()["error"]["param"])


async def test_bc_041_one_prompt_too_long_refuses_the_list(serve: Serve):
    """BC-041, vllm-project/vllm#1655: the too-long one was answered twice and shifted the others."""
    server = await serve(max_model_len=64)
    response = await server.complete(prompt=["short", "x" * 200, "short too"], max_tokens=4)
    found = await server.metrics()

    assert 400 == response.status_code
    assert "prompt 1:" in response.json()["error"]["message"]
    assert "choices" not in response.json()
    assert (0, 0) == (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"])
    assert (0, 0) == (found["vllm:prompt_tokens_total"], found["vllm:generation_tokens_total"])


async def test_bc_042_choices_of_prompts_and_samples_are_all_there_and_numbered(serve: Serve):
    """BC-042, openai/openai-python#90: two prompts with n 2 gave only the last one's choices, numbered wrongly."""
    server = await serve()
    asked: dict[str, Any] = {"prompt": ["alpha", "beta"], "n": 2, "best_of": 4, "echo": True, "max_tokens": 5}
    body = (await server.complete(**asked, seed=1, temperature=1, ignore_eos=True)).json()

    assert [0, 1, 2, 3] == [choice["index"] for choice in body["choices"]]
    assert ["alpha", "alpha", "beta", "beta"] == [
        next(prompt for prompt in asked["prompt"] if choice["text"].startswith(prompt)) for choice in body["choices"]
    ]
    assert (9, 2 * 4 * 5) == (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
    await server.until_idle()
