"""The real model against an independent implementation: Hugging Face transformers on the same file, in float32.

The reference is made by tools/reference_smollm2.py. Its prompts are of different kinds: a fact, a story, code, many
scripts, numbers, odd white space, a long repetition, a chat.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from app.chat_template import ChatTemplate
from app.settings import Settings
from core import EngineConfig, NewRequest, SamplingParams, load_engine
from core.model.kv_cache import KVCache
from core.model.numerics import Numerics, make_cache, make_model
from core.model.transformer import Transformer, flat_batch
from core.model.weights import load_model_files
from core.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.real_model

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "smollm2_reference.json").read_text(encoding="utf-8")
)
PROMPTS: dict[str, dict[str, Any]] = {prompt["name"]: prompt for prompt in REFERENCE["prompts"]}
MAX_DIFFERENCE = 1e-2
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Transformer:
    weights = load_model_files(smollm2_path)
    return Transformer(weights.config, weights.tensors, max_positions=512)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def logits_of(model: Transformer, prompt: dict[str, Any]) -> NDArray[np.float32]:
    """(32, V) logits from which each generated token was chosen, by one pass over prompt and output."""
    ids = prompt["prompt_ids"] + prompt["output_ids"][:-1]
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    batch = flat_batch([(ids, 0, list(range(num_blocks)))], BLOCK_SIZE)
    rows = np.arange(len(prompt["prompt_ids"]) - 1, len(ids))
    return model.forward(batch, KVCache(model.config, num_blocks, BLOCK_SIZE), rows)


def test_reference_is_of_this_file(smollm2_path: Path) -> None:
    assert REFERENCE["gguf_sha256"] == hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert 8 == len(PROMPTS)
    assert {32} == {len(prompt["output_ids"]) for prompt in PROMPTS.values()}


@pytest.mark.parametrize("name", PROMPTS)
def test_text_becomes_the_references_tokens(name: str, tokenizer: Tokenizer) -> None:
    prompt = PROMPTS[name]
    assert prompt["prompt_ids"] == tokenizer.encode(prompt["text"])


def test_chat_template_writes_the_references_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_token_texts)
    assert PROMPTS["chat"]["text"] == template.render(REFERENCE["messages"], add_generation_prompt=True)


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_differ_from_the_references_by_at_most_a_hundredth(name: str, model: Transformer) -> None:
    prompt = PROMPTS[name]
    logits_RV = logits_of(model, prompt)

    assert prompt["output_ids"] == logits_RV.argmax(axis=-1).tolist()
    top = np.take_along_axis(logits_RV, np.array(prompt["top_ids"]), axis=-1)
    np.testing.assert_allclose(prompt["top_logits"], top, rtol=0, atol=MAX_DIFFERENCE)
    np.testing.assert_allclose(
        prompt["fixed_logits"], logits_RV[:, REFERENCE["fixed_ids"]], rtol=0, atol=MAX_DIFFERENCE
    )


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
def test_engine_gives_the_references_tokens_to_all_prompts_at_once(
    kernels: str, smollm2_path: Path, tokenizer: Tokenizer
) -> None:
    """From text to text, in one batch, on converted weights as they are kept for the next start."""
    cache_dir = smollm2_path.parent
    load_model_files(smollm2_path, cache_dir=cache_dir)
    config = EngineConfig(
        model=str(smollm2_path),
        cache_dir=cache_dir,
        num_kv_blocks=128,
        max_model_len=512,
        kernels=kernels,
        dtype="float32",
    )
    engine = load_engine(config)
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    for name, prompt in PROMPTS.items():
        ids = tuple(engine.tokenizer.encode(prompt["text"]))
        engine.add(NewRequest(request_id=name, prompt_token_ids=ids, params=params))
    texts = dict.fromkeys(PROMPTS, "")
    tokens: dict[str, list[int]] = {name: [] for name in PROMPTS}
    while engine.has_unfinished_requests:
        for output in engine.step():
            texts[output.request_id] += output.text
            tokens[output.request_id] += [token.token_id for token in output.tokens]

    assert {name: prompt["output_ids"] for name, prompt in PROMPTS.items()} == tokens
    assert {name: tokenizer.decode(ids) for name, ids in tokens.items()} == texts
    assert texts["fact"].startswith(" Paris")


def kernels_on(dtype: str, smollm2_path: Path) -> Any:
    weights = load_model_files(smollm2_path, cache_dir=Settings().cache_dir)
    numerics = Numerics("numba", dtype, "float32" if dtype == "float32" else "bfloat16")
    model = make_model(numerics, weights.config, weights.tensors, 512, num_threads=1, cache_dir=Settings().cache_dir)

    def logits(ids: list[int], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        num_blocks = -(-len(ids) // BLOCK_SIZE)
        cache = make_cache(numerics, weights.config, num_blocks, BLOCK_SIZE)
        return model.forward(flat_batch([(ids, 0, list(range(num_blocks)))], BLOCK_SIZE), cache, rows)

    return logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_kernels_say_what_the_reference_says_where_it_is_sure(dtype: str, smollm2_path: Path) -> None:
    """float32: everywhere. Else: wherever the reference's top two are further apart than the rounding reaches."""
    sure = {"float32": 0.0, "bfloat16": 0.25, "int8": 0.8}[dtype]
    logits_of_ids = kernels_on(dtype, smollm2_path)
    for prompt in PROMPTS.values():
        ids = prompt["prompt_ids"] + prompt["output_ids"][:-1]
        logits_RV = logits_of_ids(ids, np.arange(len(prompt["prompt_ids"]) - 1, len(ids)))
        top = np.array(prompt["top_logits"])
        is_sure = top[:, 0] - top[:, 1] >= sure
        assert is_sure.sum() > len(is_sure) / 3
        expected = np.array(prompt["output_ids"])[is_sure]
        assert expected.tolist() == logits_RV.argmax(axis=-1)[is_sure].tolist(), prompt["name"]


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 1.005), ("int8", 1.02)])
def test_perplexity_of_a_committed_text_hardly_grows(dtype: str, most: float, smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    text = (Path(__file__).parents[3] / "docs" / "kv-memory.md").read_text(encoding="utf-8")
    ids = tokenizer.encode(text)[:1024]
    windows = [ids[i : i + 256] for i in range(0, len(ids), 256)]

    def perplexity(of: str) -> float:
        logits_of_ids = kernels_on(of, smollm2_path)
        losses = []
        for window in windows:
            logits_TV = logits_of_ids(window, np.arange(len(window) - 1)).astype(np.float64)
            top = logits_TV.max(axis=-1)
            log_total = top + np.log(np.exp(logits_TV - top[:, None]).sum(axis=-1))
            losses += (log_total - logits_TV[np.arange(len(window) - 1), window[1:]]).tolist()
        return float(np.exp(np.mean(losses)))

    ratio = perplexity(dtype) / perplexity("float32")
    assert 1 / most < ratio < most
