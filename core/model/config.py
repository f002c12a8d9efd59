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

# What a field that is not there means; null is another thing.
_HF_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
}
_HF_MODEL_TYPES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
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

    def __post_init__(self) -> None:
        for factor in (self.factor, *self.factors):
            if not 0 < factor < math.inf:
                raise ModelLoadError(f"rope scaling has a factor {factor}, above 0 is needed")
        if not self.low_freq_factor < self.high_freq_factor:
            raise ModelLoadError(
                f"low_freq_factor is {self.low_freq_factor}, below high_freq_factor {self.high_freq_factor} is needed"
            )


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
        if self.rope_theta <= 0 or self.rms_norm_eps < 0:
            raise ModelLoadError(
                f"rope_theta is {self.rope_theta} and rms_norm_eps {self.rms_norm_eps}, above 0 is needed"
            )
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
        fields = {**_HF_DEFAULTS[_hf_architecture(fields)], **fields}
        rope = _hf_rope(fields)
        _check_hf(fields, rope)
        hidden_size, num_heads = _whole(fields, "hidden_size"), _whole(fields, "num_attention_heads")
        max_positions = _whole(fields, "max_position_embeddings")
        return cls(
            vocab_size=_whole(fields, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_whole(fields, "intermediate_size"),
            num_layers=_whole(fields, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_whole(fields, "num_key_value_heads", num_heads),
            head_dim=_whole(fields, "head_dim", hidden_size // max(num_heads, 1)),
            rms_norm_eps=_number(fields, "rms_norm_eps", 1e-6),
            rope_theta=_number(rope, "rope_theta", 10000.0),
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
        hidden_size, num_heads = _whole(llama, "embedding_length"), _whole(llama, "attention.head_count")
        head_dim = _whole(llama, "attention.key_length", 0) or hidden_size // max(num_heads, 1)
        for name in ("attention.value_length", "rope.dimension_count"):
            if _whole(llama, name, head_dim) != head_dim:
                raise ModelLoadError(f"llama.{name} is {llama[name]}, only the head size {head_dim} is supported")
        return cls(
            vocab_size=_whole(llama, "vocab_size", 0) or len(fields.get("tokenizer.ggml.tokens", ())),
            hidden_size=hidden_size,
            intermediate_size=_whole(llama, "feed_forward_length"),
            num_layers=_whole(llama, "block_count"),
            num_heads=num_heads,
            num_kv_heads=_whole(llama, "attention.head_count_kv", 0) or num_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(llama, "attention.layer_norm_rms_epsilon"),
            rope_theta=_number(llama, "rope.freq_base", 10000.0),
            rope_scaling=_gguf_scaling(llama, rope_factors),
            max_position_embeddings=_whole(llama, "context_length"),
            tie_word_embeddings=is_tied,
        )

    @property
    def num_parameters(self) -> int:
        """Numbers in its weights."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        layer = attention + 3 * self.intermediate_size * self.hidden_size + 2 * self.hidden_size
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return embeddings + self.num_layers * layer + self.hidden_size

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


def _number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A field that is a number; null is as good as none. Raises ModelLoadError naming it."""
    value = fields.get(name)
    if value is None:
        if default is None:
            raise ModelLoadError(f"the model's configuration lacks {name}")
        return default
    if isinstance(value, list):  # GGUF writes per-layer sizes as arrays
        if len(set(map(repr, value))) != 1:
            raise ModelLoadError(f"{name} differs between layers ({value}), which is not supported")
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e18 < value < 1e18:  # NaN is not
        raise ModelLoadError(f"{name} is {value!r}, a number is needed")
    return float(value)


def _whole(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = float(_number(fields, name, default))
    if not value.is_integer():
        raise ModelLoadError(f"{name} is {value}, a whole number is needed")
    return int(value)


def _hf_architecture(fields: Mapping[str, Any]) -> str:
    names = fields.get("architectures") or _HF_MODEL_TYPES.get(str(fields.get("model_type")), "(none)")
    name = names[0] if isinstance(names, list) else names
    if name not in _HF_DEFAULTS:
        raise ModelLoadError(f"architecture {name} is not supported, supported are {', '.join(_HF_DEFAULTS)}")
    return str(name)


def _hf_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Theta and scaling. transformers 5 keeps them together in `rope_parameters`; what stands there comes first."""
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ModelLoadError(f"rope_scaling is {rope!r}, an object is needed")
    for name, value in rope.items():
        if isinstance(value, Mapping):
            raise ModelLoadError(f"rope scaling has its own parameters for {name}, which is not supported")
    outer = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    return {name: fields.get(name) for name in outer} | {k: v for k, v in rope.items() if v is not None}


def _check_hf(fields: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelLoadError(f"hidden_act {fields['hidden_act']!r} is not supported, supported is 'silu'")
    for name in ("attention_bias", "mlp_bias", "quantization_config"):
        if fields.get(name):
            raise ModelLoadError(f"{name} is set, which is not supported")
    if (share := _number(rope, "partial_rotary_factor", 1.0)) != 1.0:
        raise ModelLoadError(f"partial_rotary_factor {share} is not supported")
    window = _whole(fields, "sliding_window", 0)
    if window and window < _whole(fields, "max_position_embeddings"):
        raise ModelLoadError(f"sliding_window {window} is shorter than the context, which is not supported")


def _hf_scaling(rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    rope_type = rope.get("rope_type") or rope.get("type")  # `type` is the older spelling
    if rope_type is None and "factor" in rope:
        raise ModelLoadError("rope scaling has a factor and no rope_type")
    if rope_type in (None, "default"):
        return None
    if rope_type == "linear":
        return RopeScaling(rope_type="linear", factor=_number(rope, "factor"))
    if rope_type == "llama3":
        return RopeScaling(
            rope_type="llama3",
            factor=_number(rope, "factor"),
            low_freq_factor=_number(rope, "low_freq_factor"),
            high_freq_factor=_number(rope, "high_freq_factor"),
            original_max_position_embeddings=_whole(rope, "original_max_position_embeddings", max_positions),
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
    if llama.get("attention.causal") is False:
        raise ModelLoadError("llama.attention.causal is false: tokens that see later ones are not supported")


def _gguf_scaling(llama: Mapping[str, Any], rope_factors: tuple[float, ...]) -> RopeScaling | None:
    kind = llama.get("rope.scaling.type", "linear")  # as llama.cpp has it: a factor alone is meant to be used
    factor = _number(llama, "rope.scaling.factor", 0.0) or _number(llama, "rope.scale_linear", 0.0) or 1.0
    if kind not in ("none", "linear"):
        raise ModelLoadError(f"rope scaling {kind!r} is not supported, supported are 'linear' and rope_freqs.weight")
    linear = factor if kind == "linear" else 1.0
    if rope_factors:
        return RopeScaling(rope_type="factors", factors=tuple(linear * f for f in rope_factors))
    return RopeScaling(rope_type="linear", factor=linear) if linear != 1.0 else None
