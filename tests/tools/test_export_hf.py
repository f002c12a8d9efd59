"""Exported folders hold what we serve: loaded back, the same numbers within the rounding, the same ids and bytes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.model import tiny
from core.model.config import ModelConfig, RopeScaling
from core.model.weights import load_model_files, read_safetensors
from core.tokenizer import ByteTokenizer, load_tokenizer
from core.tokenizer_files import load_directory
from tests.core.small_models import TARGET
from tools.export_hf import DTYPES, bfloat16_bits, export, export_gguf, hf_config, write_safetensors
from tools.make_tiny_gguf import TinyModel, write_gguf

TEXTS = ["Once upon a time", "naïve café 😀\n\t你好", "stop<|end|>go", ""]


@pytest.mark.parametrize("source", [tiny.TARGET_DIR, tiny.DRAFT_DIR], ids=["target", "draft"])
def test_embedded_pair_comes_back_as_it_went(source: Path, tmp_path: Path) -> None:
    """Its weights are float16, so that writing them so loses nothing."""
    export(source, tmp_path, "float16")

    expected, found = load_model_files(source), load_model_files(tmp_path)
    assert expected.config == found.config
    for name, array in expected.tensors.items():
        np.testing.assert_array_equal(array, found.tensors[name], err_msg=name)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_become_a_vocabulary_with_the_same_ids(text: str, tmp_path: Path) -> None:
    export(tiny.TARGET_DIR, tmp_path)
    ours, exported = ByteTokenizer(), load_directory(tmp_path)

    ids = ours.encode(text)
    assert ids == exported.encode(text)
    assert ours.decode(ids) == exported.decode(ids)
    assert [ours.token_bytes(i) for i in range(257)] == [exported.token_bytes(i) for i in range(257)]
    assert ours.eos_token_ids == exported.eos_token_ids
    assert tiny.chat_template() == exported.chat_template


def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even() -> None:
    step = 2.0**-7  # between the bfloat16 numbers above 1
    values = np.array([1.0, 1 + 0.49 * step, 1 + 0.5 * step, 1 + 0.51 * step, 1 + 1.5 * step, -1 - 0.51 * step])
    expected = np.array([1.0, 1.0, 1.0, 1 + step, 1 + 2 * step, -1 - step])

    bits = bfloat16_bits(values.astype(np.float32))
    assert expected.tolist() == (bits.astype(np.uint32) << 16).view(np.float32).tolist()


@pytest.mark.parametrize(("dtype", "relative"), [("float32", 0.0), ("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_weights_are_kept_to_half_a_unit_of_the_type(dtype: str, relative: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {"a": rng.standard_normal((5, 7)).astype(np.float32), "b": rng.standard_normal(3).astype(np.float32)}
    write_safetensors(tmp_path / "x.safetensors", tensors, dtype)

    found = dict(read_safetensors(tmp_path / "x.safetensors"))
    assert set(tensors) == set(found)
    assert dtype in DTYPES
    for name, array in tensors.items():
        np.testing.assert_allclose(found[name], array, rtol=relative, atol=1e-6 if dtype == "float16" else 0)


SCALINGS = [
    None,
    RopeScaling(rope_type="linear", factor=4.0),
    RopeScaling(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=3.0),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=["none", "linear", "llama3"])
def test_config_says_the_same_in_hugging_faces_words(scaling: RopeScaling | None) -> None:
    config = replace(TARGET, rope_scaling=scaling, rope_theta=123.0, rms_norm_eps=1e-6, tie_word_embeddings=True)

    written: dict[str, Any] = json.loads(json.dumps(hf_config(config, ByteTokenizer(), "float32")))
    read = ModelConfig.from_hf(written)
    if scaling is not None and scaling.rope_type == "linear":
        assert replace(config, rope_scaling=None) == replace(read, rope_scaling=None)
        assert read.rope_scaling is not None
        assert ("linear", 4.0) == (read.rope_scaling.rope_type, read.rope_scaling.factor)
    else:
        assert config == read


def test_rotary_factors_are_refused() -> None:
    config = replace(TARGET, rope_scaling=RopeScaling(rope_type="factors", factors=(1.0, 2.0, 3.0, 4.0)))

    with pytest.raises(ValueError, match="rope_freqs"):
        hf_config(config, ByteTokenizer(), "float32")


@pytest.mark.parametrize("dtype", ["q8_0", "bfloat16"])
def test_gguf_in_another_type_is_the_same_model(dtype: str, tmp_path: Path) -> None:
    source, output = tmp_path / "source.gguf", tmp_path / "output.gguf"
    write_gguf(TinyModel(), source)
    export_gguf(source, output, dtype)

    before, after = load_model_files(source), load_model_files(output)
    assert before.config == after.config
    for name, array in before.tensors.items():
        # Q8_0 has 127 steps to the largest of each 32 values.
        np.testing.assert_allclose(after.tensors[name], array, atol=np.abs(array).max() / 127, rtol=0, err_msg=name)
    text = "Grüße! 1234 tokens"
    assert load_tokenizer(source).encode(text) == load_tokenizer(output).encode(text)


def test_gguf_is_made_from_gguf_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no "):
        export_gguf(tiny.TARGET_DIR, tmp_path / "m.gguf", "q8_0")


@pytest.mark.real_model
def test_real_model_is_exported_whole(smollm2_path: Path, tmp_path: Path) -> None:
    export(smollm2_path, tmp_path)

    expected, found = load_model_files(smollm2_path), load_model_files(tmp_path)
    assert expected.config == found.config
    name = "model.layers.7.self_attn.q_proj.weight"
    np.testing.assert_allclose(found.tensors[name], expected.tensors[name], rtol=2.0**-8)
    ours, exported = load_tokenizer(smollm2_path), load_tokenizer(tmp_path)
    assert ours.encode(TEXTS[1]) == exported.encode(TEXTS[1])
    assert ours.eos_token_ids >= exported.eos_token_ids
    assert ours.chat_template == exported.chat_template
