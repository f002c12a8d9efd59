"""What a Llama-architecture model looks like: its sizes and its rotary frequencies, read from either kind of file.

Hugging Face's `config.json` and GGUF's metadata say the same things under other names; both end here. Whatever would
change the numbers and is not built (another architecture, biases, a scaling we do not know) is refused by name, for
a model that loads and babbles is worse than one that does not load. Tensors are the affair of `core.model.weights`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import ModelLoadError

HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
GGUF_ARCHITECTURES = ("llama",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    `linear` divides all by `factor`; `llama3` divides the slow ones and blends between; `factors` (GGUF's tensor
    rope_freqs.weight, which is how llama.cpp keeps llama3) divides each by its own.
    """

    rope_type: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of one model. Raises ModelLoadError when they do not fit together.

    `head_dim` need not be hidden_size / num_heads. `num_kv_heads` < `num_heads` is grouped-query attention.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ModelLoadError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim is {self.head_dim}, rotary embedding needs an even one")
        if self.rope_scaling and self.rope_scaling.factors and len(self.rope_scaling.factors) != self.head_dim // 2:
            raise ModelLoadError(
                f"rope_freqs.weight has {len(self.rope_scaling.factors)} factors, head_dim {self.head_dim} needs"
                f" {self.head_dim // 2}"
            )

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> "ModelConfig":
        """The config that a `config.json` describes. Raises ModelLoadError naming what is missing or unsupported."""
        _check_hf(fields)
        hidden_size, num_heads = int(_need(fields, "hidden_size")), int(_need(fields, "num_attention_heads"))
        max_positions = int(fields.get("max_position_embeddings", 2048))
        # transformers 5 keeps theta and scaling together in `rope_parameters`.
        rope: Mapping[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        return cls(
            vocab_size=int(_need(fields, "vocab_size")),
            hidden_size=hidden_size,
            intermediate_size=int(_need(fields, "intermediate_size")),
            num_layers=int(_need(fields, "num_hidden_layers")),
            num_heads=num_heads,
            num_kv_heads=int(fields.get("num_key_value_heads") or num_heads),
            head_dim=int(fields.get("head_dim") or hidden_size // max(num_heads, 1)),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            rope_theta=float(fields.get("rope_theta", rope.get("rope_theta", 10000.0))),
            rope_scaling=_hf_scaling(rope, max_positions),
            max_position_embeddings=max_positions,
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        )

    @classmethod
    def from_gguf(
        cls, fields: Mapping[str, Any], *, is_tied: bool, rope_factors: tuple[float, ...] = ()
    ) -> "ModelConfig":
        """The config that GGUF metadata describes.

        Args:
            fields: metadata by full key, as plain Python values.
            is_tied: the file has no output.weight.
            rope_factors: the tensor rope_freqs.weight, if the file has one.
        """
        llama = {key.removeprefix("llama."): value for key, value in fields.items() if key.startswith("llama.")}
        _check_gguf(fields, llama)
        hidden_size, num_heads = int(_need(llama, "embedding_length")), int(_need(llama, "attention.head_count"))
        head_dim = int(llama.get("attention.key_length") or hidden_size // max(num_heads, 1))
        for name in ("attention.value_length", "rope.dimension_count"):
            if int(llama.get(name, head_dim)) != head_dim:
                raise ModelLoadError(f"llama.{name} is {llama[name]}, only the head size {head_dim} is supported")
        return cls(
            vocab_size=int(llama.get("vocab_size") or len(fields.get("tokenizer.ggml.tokens", ()))),
            hidden_size=hidden_size,
            intermediate_size=int(_need(llama, "feed_forward_length")),
            num_layers=int(_need(llama, "block_count")),
            num_heads=num_heads,
            num_kv_heads=int(llama.get("attention.head_count_kv") or num_heads),
            head_dim=head_dim,
            rms_norm_eps=float(_need(llama, "attention.layer_norm_rms_epsilon")),
            rope_theta=float(llama.get("rope.freq_base", 10000.0)),
            rope_scaling=_gguf_scaling(llama, rope_factors),
            max_position_embeddings=int(_need(llama, "context_length")),
            tie_word_embeddings=is_tied,
        )

    def kv_bytes_per_token(self, dtype_bytes: int = 4) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


def rope_frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """(head_dim / 2,) float64: the angle by which each rotary pair turns per position, scaling applied.

    Source: Su et al. 2021, arXiv:2104.09864; llama3's scaling as published with Llama 3.1.
    """
    frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "factors":
        return frequencies / np.asarray(scaling.factors, dtype=np.float64)
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """Pairs that turn fewer than `low` times in the original context are slowed, more than `high` times kept."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept_share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept_share * frequencies + (1 - kept_share) * frequencies / scaling.factor


def _need(fields: Mapping[str, Any], name: str) -> Any:
    value = fields.get(name)
    if value is None:
        raise ModelLoadError(f"the model's configuration lacks {name}")
    if isinstance(value, list):  # GGUF writes per-layer sizes as arrays
        if len(set(value)) != 1:
            raise ModelLoadError(f"{name} differs between layers ({value}), which is not supported")
        return value[0]
    return value


def _check_hf(fields: Mapping[str, Any]) -> None:
    names = fields.get("architectures") or ["LlamaForCausalLM" if fields.get("model_type") == "llama" else "(none)"]
    if names[0] not in HF_ARCHITECTURES:
        raise ModelLoadError(f"architecture {names[0]} is not supported, supported are {', '.join(HF_ARCHITECTURES)}")
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelLoadError(f"hidden_act {fields['hidden_act']!r} is not supported, supported is 'silu'")
    for name in ("attention_bias", "mlp_bias", "quantization_config"):
        if fields.get(name):
            raise ModelLoadError(f"{name} is set, which is not supported")
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError(f"partial_rotary_factor {fields['partial_rotary_factor']} is not supported")
    window = fields.get("sliding_window")
    if window and window < fields.get("max_position_embeddings", 0):
        raise ModelLoadError(f"sliding_window {window} is shorter than the context, which is not supported")


def _hf_scaling(rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"  # `type` is the older spelling
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return RopeScaling(rope_type="linear", factor=float(_need(rope, "factor")))
    if rope_type == "llama3":
        return RopeScaling(
            rope_type="llama3",
            factor=float(_need(rope, "factor")),
            low_freq_factor=float(_need(rope, "low_freq_factor")),
            high_freq_factor=float(_need(rope, "high_freq_factor")),
            original_max_position_embeddings=int(rope.get("original_max_position_embeddings") or max_positions),
        )
    raise ModelLoadError(f"rope scaling {rope_type!r} is not supported, supported are 'linear' and 'llama3'")


def _check_gguf(fields: Mapping[str, Any], llama: Mapping[str, Any]) -> None:
    architecture = fields.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelLoadError(
            f"architecture {architecture} is not supported, supported are {', '.join(GGUF_ARCHITECTURES)}"
        )
    if llama.get("expert_count"):
        raise ModelLoadError(f"llama.expert_count is {llama['expert_count']}: mixtures of experts are not supported")


def _gguf_scaling(llama: Mapping[str, Any], rope_factors: tuple[float, ...]) -> RopeScaling | None:
    kind = llama.get("rope.scaling.type", "none")
    factor = float(llama.get("rope.scaling.factor") or llama.get("rope.scale_linear") or 1.0)
    if "rope.scale_linear" in llama and "rope.scaling.type" not in llama:
        kind = "linear"  # files from before rope.scaling.type existed
    if kind not in ("none", "linear"):
        raise ModelLoadError(f"rope scaling {kind!r} is not supported, supported are 'linear' and rope_freqs.weight")
    linear = factor if kind == "linear" else 1.0
    if rope_factors:
        return RopeScaling(rope_type="factors", factors=tuple(linear * f for f in rope_factors))
    return RopeScaling(rope_type="linear", factor=linear) if linear != 1.0 else None
