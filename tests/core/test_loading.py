"""From a config to an engine: how the KV cache is cut, what is refused, and that what is loaded runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from threadpoolctl import threadpool_info, threadpool_limits

from core import loading
from core.config import EngineConfig, SpeculativeConfig
from core.errors import InvalidRequest, ModelLoadError
from core.loading import KVMemory, kv_memory, load_engine
from tests.builders import new_request, run, token_ids_of
from tools.make_tiny_gguf import TinyModel, write_gguf, write_safetensors_dir

TARGET, DRAFT = TinyModel(), TinyModel(seed=1, num_layers=1)
VOCAB_SIZE = TARGET.tokenizer.get_vocab_size()
# Keys and values of float32: layers x 2 x KV heads x head size x 4 bytes.
WEIGHT_BYTES = 4 * sum(tensor.size for tensor in TARGET.weights().values())
TARGET_BYTES, DRAFT_BYTES = 2 * 2 * 2 * 16 * 4, 1 * 2 * 2 * 16 * 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a draft, and a draft of another vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    write_safetensors_dir(TARGET, folder / "target")
    write_safetensors_dir(DRAFT, folder / "draft")
    write_safetensors_dir(TinyModel(vocab_size=300), folder / "stranger")
    write_gguf(TARGET, folder / "target.gguf")
    return folder


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """Loading sets the process's threads; leaving this puts them back."""
    with threadpool_limits(limits=2, user_api="blas"):
        yield


def config(models: Path, *, draft: str | None = None, **fields: Any) -> EngineConfig:
    speculative = SpeculativeConfig(model=str(models / draft), num_speculative_tokens=2) if draft else None
    fields = {"model": str(models / "target"), "num_threads": 1, "speculative": speculative, **fields}
    return EngineConfig(**fields)


# How the cache is cut


def test_a_given_number_of_blocks_is_taken(models: Path):
    memory = kv_memory(config(models, num_kv_blocks=10, block_size=8))

    assert KVMemory(bytes_per_token=TARGET_BYTES, block_size=8, num_blocks=10, max_model_len=80) == memory
    assert (80, 80 * TARGET_BYTES, 1.0) == (memory.num_tokens, memory.num_bytes, memory.max_concurrency)


def test_given_bytes_are_cut_into_whole_blocks(models: Path):
    for num_bytes, num_blocks in ((3 * 16 * TARGET_BYTES, 3), (4 * 16 * TARGET_BYTES - 1, 3), (16 * TARGET_BYTES, 1)):
        assert num_blocks == kv_memory(config(models, kv_cache_memory_bytes=num_bytes)).num_blocks


def test_bytes_that_hold_no_block_are_refused_with_what_one_takes(models: Path):
    with pytest.raises(InvalidRequest) as refused:
        kv_memory(config(models, kv_cache_memory_bytes=16 * TARGET_BYTES - 1))

    expected = f"kv_cache_memory_bytes is {16 * TARGET_BYTES - 1}, one block takes {16 * TARGET_BYTES}"
    assert (expected, "kv_cache_memory_bytes") == (str(refused.value), refused.value.param)


def test_by_default_every_place_has_a_whole_context_if_the_share_of_memory_allows(
    models: Path, monkeypatch: pytest.MonkeyPatch
):
    wanted = config(models, max_num_seqs=3, block_size=16)
    assert (3 * 32, 3.0) == (kv_memory(wanted).num_blocks, kv_memory(wanted).max_concurrency)

    monkeypatch.setattr(loading, "memory_limit_bytes", lambda: 4 * 40 * 16 * TARGET_BYTES)  # a quarter is 40 blocks
    assert (40, 40 / 32) == (kv_memory(wanted).num_blocks, kv_memory(wanted).max_concurrency)
    monkeypatch.setattr(loading, "memory_limit_bytes", lambda: WEIGHT_BYTES)
    assert WEIGHT_BYTES // 4 // (16 * TARGET_BYTES) == kv_memory(wanted).num_blocks


def test_concurrency_counts_whole_blocks(models: Path):
    """A context of 17 tokens needs two blocks of 16, so five blocks hold two and a half."""
    assert 2.5 == kv_memory(config(models, num_kv_blocks=5, max_model_len=17)).max_concurrency


def test_a_draft_has_its_keys_and_values_in_the_same_blocks(models: Path):
    assert TARGET_BYTES + DRAFT_BYTES == kv_memory(config(models, draft="draft")).bytes_per_token


def test_a_context_longer_than_the_models_is_refused(models: Path):
    with pytest.raises(InvalidRequest, match="max_model_len is 513, the model's limit is 512") as refused:
        kv_memory(config(models, max_model_len=513))
    assert "max_model_len" == refused.value.param
    assert 512 == kv_memory(config(models, max_model_len=512)).max_model_len


# What is loaded


def test_a_loaded_engine_answers_and_knows_its_limits(models: Path):
    it = load_engine(config(models, num_kv_blocks=8, block_size=4))
    it.add(new_request(prompt=[5, 6, 7], max_tokens=6, temperature=0, ignore_eos=True))

    assert 6 == len(token_ids_of(run(it)["a"]))
    assert (32, 8, VOCAB_SIZE) == (it.max_model_len, it.config.num_kv_blocks, it.model_config.vocab_size)


def test_rows_without_a_token_are_never_drawn(models: Path, tmp_path: Path):
    """A vocabulary is filled up to a round number; whatever stands in those rows, the answers are the model's own.

    But for an end that only generation_config.json knows: that is a token, though tokenizer.json does not have it.
    """
    path = write_safetensors_dir(TARGET, tmp_path / "padded")
    tensors = TARGET.weights()
    embedding = tensors["model.embed_tokens.weight"]
    filling = 8 * np.concatenate([embedding[:10], -embedding[:10]])  # of each two one has a large logit
    tensors["model.embed_tokens.weight"] = np.concatenate([embedding, filling])
    save_file(tensors, path / "model.safetensors")
    padded = TARGET.hf_config() | {"vocab_size": VOCAB_SIZE + 20}
    (path / "config.json").write_text(json.dumps(padded))

    assert answers(config(models, num_kv_blocks=100)) == answers(config(models, model=str(path), num_kv_blocks=100))

    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(VOCAB_SIZE, VOCAB_SIZE + 20))}))
    found, _ = answers(config(models, model=str(path), num_kv_blocks=100))
    assert any(token_id >= VOCAB_SIZE for token_ids in found for token_id in token_ids)


def test_an_end_beyond_the_models_vocabulary_is_no_end(models: Path, tmp_path: Path):
    path = write_safetensors_dir(TARGET, tmp_path / "m")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 10**6}))
    it = load_engine(config(models, model=str(path), num_kv_blocks=8))
    it.add(new_request(max_tokens=6, min_tokens=6, temperature=0))

    assert 6 == len(token_ids_of(run(it)["a"]))


def answers(it_config: EngineConfig) -> tuple[list[list[int]], bool]:
    """Tokens of greedy and seeded requests that run together, and whether any was preempted."""
    it = load_engine(it_config)
    for i in range(4):
        params = {"temperature": 0} if i % 2 else {"seed": i}
        it.add(new_request(f"r{i}", prompt=[5 + i, 6, 7, 8, 9], max_tokens=10, ignore_eos=True, **params))
    outputs = run(it)
    return [token_ids_of(outputs[f"r{i}"]) for i in range(4)], it.stats.num_preemptions > 0


def test_files_drafts_pools_and_chunks_change_no_answer(models: Path):
    """Safetensors or GGUF, with a draft or without, in a pool that preempts, in chunks of three: equal tokens."""
    expected, _ = answers(config(models, num_kv_blocks=100))
    small = {"num_kv_blocks": 8, "block_size": 4}

    assert (expected, False) == answers(config(models, model=str(models / "target.gguf"), num_kv_blocks=100))
    assert (expected, False) == answers(config(models, draft="draft", num_kv_blocks=100))
    assert (expected, True) == answers(config(models, draft="draft", **small))
    assert (expected, True) == answers(config(models, draft="draft", max_num_batched_tokens=3, **small))


def test_a_draft_that_is_the_target_has_its_greedy_drafts_accepted(models: Path):
    it = load_engine(config(models, draft="target", num_kv_blocks=100))
    it.add(new_request(max_tokens=10, temperature=0, ignore_eos=True))
    run(it)

    assert 0 < it.stats.num_draft_tokens == it.stats.num_accepted_tokens


def test_numerics_use_as_many_threads_as_told(models: Path):
    load_engine(config(models, num_kv_blocks=4))

    assert {1} == {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


# What is refused


@pytest.mark.parametrize("tensor", ["output_norm.weight", "blk.0.attn_norm.weight"])
def test_weights_that_are_no_numbers_are_refused(models: Path, tmp_path: Path, tensor: str):
    """At once, rather than request by request."""
    file = write_gguf(TARGET, tmp_path / "m.gguf", extra_tensors={tensor: np.full(64, np.nan, np.float32)})
    with pytest.raises(ModelLoadError, match=r"weights of the target model are damaged: .* not finite"):
        load_engine(config(models, model=str(file), num_kv_blocks=4))


@pytest.mark.parametrize("name", ["num_kv_blocks", "kv_cache_memory_bytes"])
def test_a_cache_beyond_the_machines_memory_is_refused_before_it_is_made(models: Path, name: str):
    with pytest.raises(
        InvalidRequest, match=f"{name} asks for .* bytes of KV cache, this machine's limit is"
    ) as refused:
        load_engine(config(models, **{name: 10**18}))
    assert name == refused.value.param


def test_the_cache_has_what_the_weights_leave(models: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "memory_limit_bytes", lambda: WEIGHT_BYTES + 4 * 16 * TARGET_BYTES)

    assert 4 == kv_memory(config(models, num_kv_blocks=4)).num_blocks
    with pytest.raises(InvalidRequest, match=f"num_kv_blocks asks for .* of which the weights take {WEIGHT_BYTES:,}"):
        kv_memory(config(models, num_kv_blocks=5))


@pytest.mark.parametrize("model", ["target", "target.gguf"])
def test_weights_beyond_the_machines_memory_are_refused(models: Path, model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "memory_limit_bytes", lambda: WEIGHT_BYTES - 1)
    with pytest.raises(ModelLoadError, match=f"the weights of .*{model} take {WEIGHT_BYTES:,} bytes as float32"):
        load_engine(config(models, model=str(models / model), num_kv_blocks=4))


def test_a_draft_of_another_vocabulary_is_refused(models: Path):
    with pytest.raises(ModelLoadError, match=f"draft model has vocabulary 300, the target's is {VOCAB_SIZE}"):
        load_engine(config(models, draft="stranger", num_kv_blocks=4))


def test_speculation_on_a_model_of_ones_own_needs_a_draft(models: Path):
    with pytest.raises(InvalidRequest, match="speculative method draft_model needs a draft 'model' beside") as refused:
        load_engine(config(models, speculative=SpeculativeConfig()))
    assert "model" == refused.value.param


def test_a_model_that_is_not_there_is_named(models: Path):
    with pytest.raises(ModelLoadError, match="nowhere"):
        load_engine(config(models, model=str(models / "nowhere")))


# The embedded pair


def test_the_embedded_model_runs_with_its_draft_and_without():
    """The same greedy text either way."""
    texts = []
    for speculative in (None, SpeculativeConfig()):
        it = load_engine(EngineConfig(num_kv_blocks=16, num_threads=1, speculative=speculative))
        it.add(new_request(prompt=list(b"Once upon a time"), max_tokens=24, temperature=0))
        texts.append(token_ids_of(run(it)["a"]))

    assert 24 == len(texts[0])
    assert texts[0] == texts[1]
    assert it.stats.num_accepted_tokens > 0
