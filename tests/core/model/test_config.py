"""Configs: both kinds of file end in the same sizes and frequencies, and what is not supported is refused by name."""

from typing import Any

import numpy as np
import pytest

from core.errors import ModelLoadError
from core.model.config import ModelConfig, RopeScaling, rope_frequencies

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.vocab_size": 100,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 3,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
    "llama.context_length": 256,
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def make_config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(HF | changes)


def test_both_kinds_of_file_give_the_same_config() -> None:
    expected = ModelConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=5000.0,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    assert expected == ModelConfig.from_hf(HF)
    assert expected == ModelConfig.from_gguf(GGUF, is_tied=True)


def test_head_size_need_not_follow_from_the_hidden_size() -> None:
    assert 32 == make_config(head_dim=32).head_dim
    assert 32 == ModelConfig.from_gguf(GGUF | {"llama.attention.key_length": 32, "llama.attention.value_length": 32,
                                               "llama.rope.dimension_count": 32}, is_tied=True).head_dim  # fmt: skip


def test_without_kv_heads_every_query_head_has_its_own() -> None:
    hf = {k: v for k, v in HF.items() if k != "num_key_value_heads"}
    gguf = {k: v for k, v in GGUF.items() if k != "llama.attention.head_count_kv"}
    assert 4 == ModelConfig.from_hf(hf).num_kv_heads == ModelConfig.from_gguf(gguf, is_tied=True).num_kv_heads


def test_gguf_vocabulary_without_its_size_is_counted() -> None:
    fields = {k: v for k, v in GGUF.items() if k != "llama.vocab_size"} | {"tokenizer.ggml.tokens": ["a", "b", "c"]}
    assert 3 == ModelConfig.from_gguf(fields, is_tied=True).vocab_size


def test_kv_bytes_per_token_counts_keys_and_values_of_all_layers() -> None:
    assert 2 * 3 * 2 * 16 * 4 == make_config().kv_bytes_per_token()
    assert 2 * 3 * 2 * 16 * 2 == make_config().kv_bytes_per_token(dtype_bytes=2)


def test_frequencies_without_scaling_fall_geometrically_from_one() -> None:
    frequencies = rope_frequencies(make_config())

    assert np.float64 == frequencies.dtype
    np.testing.assert_allclose(5000.0 ** (-np.arange(8) / 8), frequencies, rtol=1e-12)


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_linear_scaling_divides_every_frequency(spelling: str) -> None:
    scaled = rope_frequencies(make_config(rope_scaling={spelling: "linear", "factor": 4.0}))
    np.testing.assert_allclose(rope_frequencies(make_config()) / 4, scaled, rtol=1e-12)


def test_gguf_linear_scaling_equals_hugging_faces() -> None:
    fields = GGUF | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    expected = make_config(rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert expected == ModelConfig.from_gguf(fields, is_tied=True)
    assert expected == ModelConfig.from_gguf(GGUF | {"llama.rope.scale_linear": 4.0}, is_tied=True)
    assert expected == ModelConfig.from_gguf(GGUF | {"llama.rope.scaling.factor": 4.0}, is_tied=True)


def test_transformers_5_spelling_of_rope_parameters_is_understood() -> None:
    old = make_config(rope_theta=500000.0, rope_scaling={"rope_type": "llama3"} | LLAMA3)
    without_theta = {k: v for k, v in HF.items() if k != "rope_theta"}
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0} | LLAMA3}
    assert old == ModelConfig.from_hf(without_theta | new)


def test_what_stands_among_the_rope_parameters_comes_before_what_stands_outside() -> None:
    inside = {"rope_type": "llama3", "rope_theta": 77.0} | LLAMA3
    config = make_config(rope_parameters=inside, rope_theta=88.0, original_max_position_embeddings=99)
    assert config.rope_scaling is not None
    assert (77.0, 8192) == (config.rope_theta, config.rope_scaling.original_max_position_embeddings)

    del inside["original_max_position_embeddings"], inside["rope_theta"]
    config = make_config(rope_parameters=inside, rope_theta=88.0, original_max_position_embeddings=99)
    assert config.rope_scaling is not None
    assert (88.0, 99) == (config.rope_theta, config.rope_scaling.original_max_position_embeddings)


def test_null_is_as_good_as_no_field() -> None:
    names = ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "partial_rotary_factor",
             "attention_bias", "sliding_window", "tie_word_embeddings", "architectures")  # fmt: skip
    without = {name: value for name, value in HF.items() if name not in names} | {"model_type": "llama"}
    assert ModelConfig.from_hf(without) == ModelConfig.from_hf(without | dict.fromkeys(names))


def test_gguf_sizes_may_be_told_layer_by_layer() -> None:
    """As arrays, where all layers are the same."""
    sizes = {name: [GGUF[name]] * 3 for name in ("llama.attention.head_count", "llama.attention.head_count_kv",
                                                 "llama.feed_forward_length")}  # fmt: skip
    more = {"llama.attention.key_length": [16] * 3, "llama.rope.dimension_count": [16] * 3}
    assert ModelConfig.from_gguf(GGUF, is_tied=True) == ModelConfig.from_gguf(GGUF | sizes | more, is_tied=True)


def test_default_scaling_is_none() -> None:
    assert make_config(rope_scaling={"rope_type": "default"}).rope_scaling is None
    fields = GGUF | {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    assert ModelConfig.from_gguf(fields, is_tied=True).rope_scaling is None


def test_gguf_rope_factors_divide_each_frequency_by_its_own() -> None:
    factors = tuple(float(f) for f in range(1, 9))
    config = ModelConfig.from_gguf(GGUF, is_tied=True, rope_factors=factors)

    assert RopeScaling(rope_type="factors", factors=factors) == config.rope_scaling
    np.testing.assert_allclose(rope_frequencies(make_config()) / np.arange(1, 9), rope_frequencies(config), rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPTNeoXForCausalLM"]}, "GPTNeoXForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}, "low_freq_factor"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 3}, "num_kv_heads 2"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"hidden_size": "64"}, "hidden_size is '64', a number"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5, a whole number"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings is 1000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": {"factor": 4.0}}, "no rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor 0"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor is 'x'"),
        ({"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor is 1.0"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "full_attention"),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, "sliding_window 4096"),
    ],
)
def test_unsupported_hugging_face_config_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        make_config(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "qwen2"}, "qwen2"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
        ({"llama.attention.head_count": [4, 2, 4]}, "head_count differs"),
        ({"llama.attention.head_count_kv": [2, 2, 4]}, "head_count_kv differs"),
        ({"llama.attention.head_count_kv": []}, "head_count_kv differs"),
        ({"llama.context_length": "256"}, "context_length is '256'"),
        ({"llama.attention.causal": False}, "causal is false"),
        ({"llama.block_count": None}, "block_count"),
    ],
)
def test_unsupported_gguf_metadata_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        ModelConfig.from_gguf(GGUF | changes, is_tied=True)


def test_wrong_number_of_rope_factors_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="has 3 factors, head_dim 16 needs 8"):
        ModelConfig.from_gguf(GGUF, is_tied=True, rope_factors=(1.0, 1.0, 1.0))


def test_rope_factors_that_are_no_divisors_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"factor 0\.0"):
        ModelConfig.from_gguf(GGUF, is_tied=True, rope_factors=(1.0,) * 7 + (0.0,))


def test_mistral_has_defaults_of_its_own() -> None:
    bare = {k: v for k, v in HF.items() if k not in ("num_key_value_heads", "architectures")}
    config = ModelConfig.from_hf(bare | {"model_type": "mistral", "num_attention_heads": 16})
    assert 8 == config.num_kv_heads


def test_mistral_without_a_window_is_a_llama() -> None:
    assert make_config() == make_config(architectures=["MistralForCausalLM"], sliding_window=None)
    assert make_config() == make_config(architectures=["MistralForCausalLM"], sliding_window=256)
