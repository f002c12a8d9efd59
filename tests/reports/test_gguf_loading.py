"""Public reports about GGUF loaders, BC-112, 115, 117 and 119: models that load without a word and answer wrongly.

The reference is a dense float64 Llama over the weights as they were before any file was written.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from core import EngineConfig, NewRequest, OutputToken, SamplingParams, load_engine
from core.model.config import ModelConfig, rope_frequencies
from core.model.weights import load_model_config, load_model_files
from tests.reports.conftest import Serve
from tools.make_tiny_gguf import BOS, EOS, TinyModel, write_gguf, write_safetensors_dir

NUM_TOKENS = 20
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def make_prompts(num_prompts: int, longest: int, vocab_size: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(7)
    return [tuple(rng.integers(2, vocab_size, rng.integers(1, longest + 1)).tolist()) for _ in range(num_prompts)]


def generate(path: Path, prompts: Sequence[Sequence[int]]) -> list[list[OutputToken]]:
    """Greedy continuations with five alternatives a token, all prompts at once."""
    engine = load_engine(EngineConfig(model=str(path), num_kv_blocks=512))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, num_logprobs=5, ignore_eos=True)
    for n, prompt in enumerate(prompts):
        engine.add(NewRequest(request_id=str(n), prompt_token_ids=tuple(prompt), params=params))
    tokens: dict[str, list[OutputToken]] = {str(n): [] for n in range(len(prompts))}
    while engine.has_unfinished_requests:
        for output in engine.step():
            tokens[output.request_id] += output.tokens
    return list(tokens.values())


def ids_of(tokens: list[OutputToken]) -> list[int]:
    return [token.token_id for token in tokens]


def dense_logits(model: TinyModel, weights: dict[str, NDArray[np.float32]], token_ids: Sequence[int]) -> Any:
    """(len(token_ids), vocabulary) logits, written down from the architecture without a cache or a batch."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    num_tokens, half = len(token_ids), model.head_dim // 2
    frequencies = rope_frequencies(ModelConfig.from_hf(model.hf_config()))
    angles = np.arange(num_tokens)[:, None, None] * frequencies
    future = np.triu(np.full((num_tokens, num_tokens), -np.inf), 1)

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[name + ".weight"]

    def heads(x: Any, layer: str, name: str) -> Any:
        return (x @ w[f"{layer}.self_attn.{name}_proj.weight"].T).reshape(num_tokens, -1, model.head_dim)

    def rotate(x: Any) -> Any:
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    x = w["model.embed_tokens.weight"][list(token_ids)]
    for i in range(model.num_layers):
        layer = f"model.layers.{i}"
        normed = norm(x, f"{layer}.input_layernorm")
        q, k = rotate(heads(normed, layer, "q")), rotate(heads(normed, layer, "k"))
        k, v = (np.repeat(y, model.num_heads // model.num_kv_heads, 1) for y in (k, heads(normed, layer, "v")))
        scores = np.einsum("the,che->htc", q, k) / np.sqrt(model.head_dim) + future
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("htc,che->the", shares / shares.sum(-1, keepdims=True), v).reshape(num_tokens, -1)
        x = x + attended @ w[f"{layer}.self_attn.o_proj.weight"].T
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate = normed @ w[f"{layer}.mlp.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (normed @ w[f"{layer}.mlp.up_proj.weight"].T)
        x = x + inner @ w[f"{layer}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


class Reference:
    """What the dense model says at each generated position, given the tokens before: one pass over all of them."""

    def __init__(
        self,
        model: TinyModel,
        weights: dict[str, NDArray[np.float32]],
        prompt: Sequence[int],
        tokens: list[OutputToken],
    ) -> None:
        self.tokens = tokens
        self.logits = dense_logits(model, weights, [*prompt, *ids_of(tokens)])[len(prompt) - 1 : -1]

    @property
    def choices(self) -> list[int]:
        """Its greedy choices; equal to all tokens if and only if they are its greedy continuation."""
        ids: list[int] = self.logits.argmax(-1).tolist()
        return ids

    def assert_logprobs(self) -> None:
        """Every alternative of every token has the reference's log-probability, within 1e-3."""
        logprobs = self.logits - self.logits.max(-1, keepdims=True)
        logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
        for row, token in zip(logprobs, self.tokens, strict=True):
            assert token.logprobs is not None
            assert 5 == len(token.logprobs.top)
            for token_id, logprob in token.logprobs.top:
                assert row[token_id] == pytest.approx(logprob, abs=1e-3)


def test_bc112_gguf_twin_answers_as_its_safetensors_and_the_reference(tmp_path: Path) -> None:
    """BC-112, huggingface/transformers#31766: q and k come in llama.cpp's row order, which has to be undone.

    Every tensor is equal then, and so is every answer.
    """
    model = TinyModel()
    hf, gguf = write_safetensors_dir(model, tmp_path / "hf"), write_gguf(model, tmp_path / "model.gguf")
    for name, value in model.weights().items():
        np.testing.assert_array_equal(value, load_model_files(gguf).tensors[name], err_msg=name)

    prompts = make_prompts(20, 40, model.tokenizer.get_vocab_size())
    from_hf, from_gguf = generate(hf, prompts), generate(gguf, prompts)
    for prompt, a, b in zip(prompts, from_hf, from_gguf, strict=True):
        assert ids_of(a) == ids_of(b)
        for tokens in (a, b):
            reference = Reference(model, model.weights(), prompt, tokens)
            assert reference.choices == ids_of(tokens)
            reference.assert_logprobs()


def test_bc112_rows_in_the_other_order_answer_otherwise(tmp_path: Path) -> None:
    """BC-112: what the test above would see of a loader that leaves the rows as they are."""
    model = TinyModel()
    names = {"blk.0.attn_q.weight": "q", "blk.0.attn_k.weight": "k"}
    rows = {g: model.weights()[f"model.layers.0.self_attn.{x}_proj.weight"] for g, x in names.items()}
    prompts = make_prompts(20, 40, model.tokenizer.get_vocab_size())

    wrong = generate(write_gguf(model, tmp_path / "model.gguf", extra_tensors=rows), prompts)
    references = [Reference(model, model.weights(), p, tokens) for p, tokens in zip(prompts, wrong, strict=True)]
    assert [reference.choices for reference in references] != [ids_of(tokens) for tokens in wrong]


def test_bc115_untied_output_matrix_is_used(tmp_path: Path) -> None:
    """BC-115, 1bit-MONSTER/1bit-MONSTER#319, untied output matrix ignored."""
    model = TinyModel(output_is_rotated=True)
    weights = model.weights()
    tied = {name: value for name, value in weights.items() if name != "lm_head.weight"}
    prompts = make_prompts(5, 20, model.tokenizer.get_vocab_size())

    answers = generate(write_gguf(model, tmp_path / "model.gguf"), prompts)
    for prompt, tokens in zip(prompts, answers, strict=True):
        reference = Reference(model, weights, prompt, tokens)
        assert reference.choices == ids_of(tokens)
        assert Reference(model, tied, prompt, tokens).choices != ids_of(tokens)
        reference.assert_logprobs()


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_bc117_llama3_scaling_gives_the_published_frequencies(spelling: str, tmp_path: Path) -> None:
    """BC-117, lablup/mlxcel#1355, llama3 rope scaling parsed but never applied."""
    expected = {
        0: 1.0,
        1: 0.66360124,
        15: 1.2905479e-3,
        16: 4.2955680e-4,
        17: 9.7082878e-5,
        18: 1.9461638e-5,
        31: 9.4183067e-8,
    }
    scaling = {spelling: "llama3", **LLAMA3}
    model = TinyModel(head_dim=64, num_heads=1, num_kv_heads=1, rope_theta=500000.0, rope_scaling=scaling)
    hf, gguf = write_safetensors_dir(model, tmp_path / "hf"), write_gguf(model, tmp_path / "model.gguf")

    for path in (hf, gguf):
        frequencies = rope_frequencies(load_model_config(path))
        assert 32 == len(frequencies)
        for index, value in expected.items():
            assert value == pytest.approx(frequencies[index], rel=1e-6), (path.name, index)


@pytest.mark.parametrize("kind", ["llama3", "linear"])
def test_bc117_scaling_is_applied_to_long_prompts(kind: str, tmp_path: Path) -> None:
    """BC-117: not only read: answers far into the context equal the reference's, and not the unscaled model's."""
    scaling = {"rope_type": kind, "factor": 8.0}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model, unscaled = TinyModel(rope_scaling=scaling), TinyModel()
    prompt = tuple(np.random.default_rng(3).integers(2, model.tokenizer.get_vocab_size(), 300).tolist())
    hf, gguf = write_safetensors_dir(model, tmp_path / "hf"), write_gguf(model, tmp_path / "model.gguf")

    for path in (hf, gguf):
        (tokens,) = generate(path, [prompt])
        reference = Reference(model, model.weights(), prompt, tokens)
        assert reference.choices == ids_of(tokens)
        assert Reference(unscaled, model.weights(), prompt, tokens).choices != ids_of(tokens)
        reference.assert_logprobs()


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
async def test_bc119_bos_comes_exactly_once(kind: str, tmp_path: Path, serve: Serve) -> None:
    """BC-119, InfiniTensor/InfiniLM#388, BOS added twice: one comes, whoever wrote it, template, user or nobody."""
    model = TinyModel(adds_bos=True)
    path = write_gguf(model, tmp_path / "m.gguf") if kind == "gguf" else write_safetensors_dir(model, tmp_path / "hf")
    server = await serve(model=str(path), num_kv_blocks=64, cache_dir=tmp_path / "cache")
    bos, content = model.tokenizer.token_to_id(BOS), "hello there"
    expected = [bos, *model.tokenizer.encode(content, add_special_tokens=False).ids]
    chat_text = f"{BOS}<user>{content}{EOS}<assistant>"
    expected_chat = model.tokenizer.encode(chat_text, add_special_tokens=False).ids
    messages = [{"role": "user", "content": content}]

    async def tokens(**body: Any) -> list[int]:
        response: httpx.Response = await server.client.post("/tokenize", json=body)
        ids: list[int] = response.raise_for_status().json()["tokens"]
        return ids

    async def num_prompt_tokens(response: httpx.Response) -> int:
        number: int = response.raise_for_status().json()["usage"]["prompt_tokens"]
        return number

    assert 1 == expected_chat.count(bos)
    for prompt in (content, BOS + content):
        assert expected == await tokens(prompt=prompt)
        assert len(expected) == await num_prompt_tokens(await server.complete(prompt=prompt, max_tokens=1))
    for adds in (None, False, True):
        body = {"messages": messages, "add_special_tokens": adds}
        assert expected_chat == await tokens(**body)
        assert len(expected_chat) == await num_prompt_tokens(await server.chat(max_tokens=1, **body))
