"""Public reports on log-probabilities that are missing, shifted or no numbers, of prompts above all."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core import EngineConfig
from core.engine import Engine
from core.step import count_only
from tests.app.servers import MODEL, RunningServer, in_process
from tests.core.test_tokenizer_gguf import spm
from tests.reports.conftest import Serve
from tools.make_tiny_gguf import TinyModel, write_gguf

PROMPT = "\n7. Maya has 30"


def strict(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def chunks(text: str) -> list[Any]:
    *events, done, end = text.split("\n\n")
    assert ("data: [DONE]", "") == (done, end)
    return [strict(event.removeprefix("data: ")) for event in events]


async def choice_of(server: RunningServer, **body: Any) -> Any:
    response = await server.complete(**{"temperature": 0, **body})
    assert 200 == response.status_code, response.text
    (choice,) = strict(response.text)["choices"]
    return choice


def assert_aligned(choice: Any) -> None:
    lists = choice["logprobs"]
    assert 1 == len({len(values) for values in lists.values()})
    assert choice["text"] == "".join(lists["tokens"])
    assert lists["text_offset"] == [len("".join(lists["tokens"][:i])) for i in range(len(lists["tokens"]))]


def assert_scored(lists: Any) -> None:
    """Null for the first token, a finite number of at most 0 for every other."""
    assert (None, None) == (lists["token_logprobs"][0], lists["top_logprobs"][0])
    assert all(-9999 <= logprob <= 0 for logprob in lists["token_logprobs"][1:])


@pytest.mark.parametrize("more", [{"top_p": 0.3}, {"top_k": 1}, {"logit_bias": {"101": -100}}], ids=str)
async def test_bc_021_every_number_is_finite(serve: Serve, more: dict[str, Any]):
    """BC-021, sgl-project/sglang#5984: a low temperature with top_p made some numbers infinite, and JSON broke."""
    server = await serve()
    asked = {"prompt": "p", "temperature": 0.01, "max_tokens": 50, "logprobs": 5, "seed": 1, "ignore_eos": True, **more}
    whole = await choice_of(server, **asked)
    events = chunks((await server.complete(**asked, stream=True)).text)

    lists = whole["logprobs"]
    numbers = [*lists["token_logprobs"], *(n for top in lists["top_logprobs"] for n in top.values())]
    assert 50 == len(lists["tokens"])
    assert all(isinstance(number, float) and -9999 <= number <= 0 for number in numbers)
    streamed = [n for event in events for c in event["choices"] for n in c["logprobs"]["token_logprobs"]]
    assert lists["token_logprobs"] == streamed


@pytest.mark.parametrize("vocabulary", ["bytes", "byte-level BPE", "SentencePiece"])
async def test_bc_023_echoed_tokens_and_offsets_add_up_to_the_text(serve: Serve, vocabulary: str, tmp_path: Path):
    """BC-023, vllm-project/vllm#5334: echoed tokens, decoded beside their neighbours, did not join to the text."""
    asked = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 5}
    if vocabulary == "SentencePiece":
        engine = Engine(EngineConfig(num_kv_blocks=64), replace(MODEL, vocab_size=512), spm(), count_only)
        async with in_process(engine) as server:
            choice = await choice_of(server, **asked)
    elif vocabulary == "bytes":
        choice = await choice_of(await serve(), **asked)
    else:
        path = write_gguf(TinyModel(), tmp_path / "model.gguf")
        choice = await choice_of(await serve(model=str(path), num_kv_blocks=64, cache_dir=tmp_path), **asked)

    assert choice["text"].startswith(PROMPT)
    assert_aligned(choice)
    assert_scored(choice["logprobs"])
    if vocabulary != "bytes":
        assert "" == choice["logprobs"]["tokens"][0]  # its beginning-of-sequence token


async def test_bc_025_echo_brings_the_prompts_logprobs(serve: Serve):
    """BC-025, ggml-org/llama.cpp#27174: only the generated token had one, and scoring came out at chance level."""
    choice = await choice_of(await serve(), prompt="The sky is", echo=True, logprobs=1, max_tokens=1)

    assert 10 + 1 == len(choice["logprobs"]["tokens"])
    assert_scored(choice["logprobs"])
    assert_aligned(choice)


@pytest.mark.parametrize("prompt", ["The sky is", list(b"The sky is")], ids=["text", "ids"])
@pytest.mark.parametrize("logprobs", [None, 2])
async def test_bc_026_a_prompt_can_be_scored_without_generating(serve: Serve, prompt: Any, logprobs: int | None):
    """BC-026, vllm-project/vllm#2995: max_tokens 0 with echo failed, with log-probabilities or without."""
    server = await serve()
    asked = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": logprobs}
    body = (await server.complete(**asked)).json()
    (choice,), usage = body["choices"], body["usage"]

    assert ("The sky is", "length") == (choice["text"], choice["finish_reason"])
    assert (10, 0, 10) == (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
    assert (logprobs is None) == (choice["logprobs"] is None)
    if logprobs is not None:
        assert 10 == len(choice["logprobs"]["tokens"])
        assert_scored(choice["logprobs"])
    await server.until_idle()


@pytest.mark.parametrize("length", [33, 32, 31])
async def test_bc_029_a_cached_prompt_is_scored_like_a_new_one(serve: Serve, length: int):
    """BC-029, vllm-project/vllm#8268: cached positions have no logits: a repeated prompt crashed or was shifted."""
    server = await serve(block_size=16)
    prompt = list(b"Once upon a time there was a girl who lived")[:length]
    scored = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1}
    first, again = [await choice_of(server, **scored) for _ in range(2)]
    plain = (await server.complete(prompt=prompt, max_tokens=1)).json()

    assert first == again
    assert length + 1 == len(first["logprobs"]["token_logprobs"])
    assert_scored(first["logprobs"])
    assert (length - 1) // 16 * 16 == plain["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_bc_030_a_prompt_in_chunks_has_one_complete_list(serve: Serve):
    """BC-030, vllm-project/vllm#14239: a prompt in pieces gave partial lists, or ended the engine."""
    prompt = ("Once upon a time there was a girl who lived by the sea. " * 6)[:300]
    asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1}
    chunked, whole = await serve(max_num_batched_tokens=64), await serve(max_num_batched_tokens=4096)
    cut, uncut = await choice_of(chunked, **asked), await choice_of(whole, **asked)
    events = chunks((await chunked.complete(**asked, temperature=0, stream=True)).text)

    assert 301 == len(cut["logprobs"]["tokens"])
    assert_scored(cut["logprobs"])
    assert uncut == cut
    assert cut["logprobs"]["token_logprobs"] == [
        logprob for event in events for choice in event["choices"] for logprob in choice["logprobs"]["token_logprobs"]
    ]
    assert [300, 1] == [len(event["choices"][0]["logprobs"]["tokens"]) for event in events]


@pytest.mark.parametrize("scored", [{"logprobs": 3}, {"prompt_logprobs": 3}], ids=str)
async def test_a_prompt_is_described_once_for_all_of_its_choices(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, scored: dict[str, Any]
):
    """Else one request with many samples of a long prompt would hold the event loop, and everybody, for a minute."""
    server = await serve()
    tokenizer = server.engine.tokenizer
    described: list[int] = []
    text_of = tokenizer.token_text
    monkeypatch.setattr(tokenizer, "token_text", lambda token_id: described.append(token_id) or text_of(token_id))
    counts = []
    for n in (1, 8):
        described.clear()
        body = (await server.complete(prompt=["The sky", "is"], echo=True, max_tokens=0, n=n, **scored)).json()
        counts.append(len(described))

        lists = [choice["logprobs"] or choice["prompt_logprobs"] for choice in body["choices"]]
        assert [lists[0]] * n + [lists[n]] * n == lists
    assert counts[0] == counts[1] > 0
