"""Which arithmetic a model runs on, and what every provider of it can do.

NumPy is the reference: float32, always there. The kernels compute the same in fewer passes over memory, with weights in
float32, bfloat16 or int8; they need the package numba and a model whose widths are whole panels. `resolve` chooses.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from core.config import DTYPES, KERNELS, KV_CACHE_DTYPES
from core.errors import InvalidRequest
from core.model.config import ModelConfig
from core.model.transformer import FlatBatch

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
_PANEL, _LANES = 32, 16  # as in core.model.kernels, which need not be imported to know that a model suits them


class Cache(Protocol):
    """Keys and values of every slot: see `core.model.kv_cache.KVCache`, which says what each of these does."""

    @property
    def block_size(self) -> int: ...
    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None: ...
    def store(self, pairs: Sequence[tuple[int, int]]) -> None: ...
    def load(self, pairs: Sequence[tuple[int, int]]) -> None: ...


class Model(Protocol):
    """A model that computes: see `core.model.transformer.Transformer`. Its cache is one of its own provider."""

    config: ModelConfig

    def forward(self, batch: FlatBatch, cache: Any, logits_rows: Ints) -> Floats: ...
    def hidden_states(self, batch: FlatBatch, cache: Any, rows: Ints) -> Floats: ...
    def logits(self, hidden_RD: Floats) -> Floats: ...


@dataclass(frozen=True, slots=True)
class Numerics:
    """What was chosen: `numpy` or `numba`, and of what type weights and the KV cache are."""

    kernels: str
    dtype: str
    kv_cache_dtype: str

    @property
    def kv_bytes(self) -> int:
        """Of one number in the KV cache."""
        return 2 if self.kv_cache_dtype == "bfloat16" else 4

    @property
    def weight_bytes(self) -> int:
        """Of one number in the weights."""
        return {"float32": 4, "bfloat16": 2, "int8": 1}[self.dtype]

    def __str__(self) -> str:
        return f"{self.kernels}, {self.dtype} weights, {self.kv_cache_dtype} KV cache"


def resolve(
    kernels: str, dtype: str, kv_cache_dtype: str, configs: Sequence[ModelConfig], block_size: int, *, is_embedded: bool
) -> Numerics:
    """What `auto` means here, and whether the rest can be had.

    The embedded model stays with NumPy unless it is told otherwise: its steps are short, and its start would wait for
    compiled code. Other models take the kernels, in bfloat16, where they can.

    Raises:
        InvalidRequest: an explicit wish that cannot be fulfilled, with the reason.
    """
    for name, value, allowed in (
        ("kernels", kernels, KERNELS),
        ("dtype", dtype, DTYPES),
        ("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES),
    ):
        if value not in allowed:
            raise InvalidRequest(f"{name} is {value!r}, allowed are {', '.join(allowed)}", name)
    is_compact = {dtype, kv_cache_dtype} & {"bfloat16", "int8"}
    field = "dtype" if dtype in is_compact else "kv_cache_dtype"
    obstacle = _obstacle(configs, block_size)
    if kernels == "auto":
        kernels = "numba" if obstacle is None and (is_compact or not is_embedded) else "numpy"
        if is_compact and obstacle is not None:
            raise InvalidRequest(f"{', '.join(sorted(is_compact))} needs kernels numba: {obstacle}", field)
    if kernels == "numba" and obstacle is not None:
        raise InvalidRequest(f"kernels numba cannot be had: {obstacle}", "kernels")
    if kernels == "numpy" and is_compact:
        raise InvalidRequest(f"kernels numpy compute in float32, not in {', '.join(sorted(is_compact))}", field)
    if dtype == "auto":
        dtype = "float32" if kernels == "numpy" or is_embedded else "bfloat16"
    if kv_cache_dtype == "auto":
        kv_cache_dtype = "float32" if dtype == "float32" else "bfloat16"
    return Numerics(kernels, dtype, kv_cache_dtype)


def _obstacle(configs: Sequence[ModelConfig], block_size: int) -> str | None:
    """Why the kernels will not do, or None."""
    if block_size % _LANES:
        return f"block_size is {block_size}, a multiple of {_LANES} is needed"
    for config in configs:
        for name in ("hidden_size", "intermediate_size", "head_dim"):
            if getattr(config, name) % _PANEL:
                return f"the model's {name} is {getattr(config, name)}, a multiple of {_PANEL} is needed"
    if importlib.util.find_spec("numba") is None:
        return "the package numba is not installed (the extra 'fast' brings it)"
    return None


def make_model(
    numerics: Numerics,
    config: ModelConfig,
    tensors: Mapping[str, NDArray[np.floating[Any]]],
    max_positions: int,
    *,
    num_threads: int,
    cache_dir: Path | None,
) -> Model:
    """The model on the chosen arithmetic; `cache_dir` keeps compiled kernels."""
    if numerics.kernels == "numpy":
        from core.model.transformer import Transformer

        return Transformer(config, tensors, max_positions)
    from core.model import kernels

    model: Model = kernels.load(cache_dir).PackedTransformer(
        config, tensors, max_positions, dtype=numerics.dtype, num_threads=num_threads
    )
    return model


def make_cache(
    numerics: Numerics,
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    *,
    num_tier_slots: int = 0,
    tier_file: Path | None = None,
) -> Cache:
    """The KV cache that goes with it."""
    if numerics.kernels == "numpy":
        from core.model.kv_cache import KVCache

        return KVCache(config, num_blocks, block_size, num_tier_slots=num_tier_slots, tier_file=tier_file)
    from core.model.kernels.packed_cache import PackedKVCache

    return PackedKVCache(
        config,
        num_blocks,
        block_size,
        numerics.kv_cache_dtype,
        num_tier_slots=num_tier_slots,
        tier_file=tier_file,
    )
