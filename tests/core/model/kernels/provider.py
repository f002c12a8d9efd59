"""Kernels and models for tests; compiled code lies where the server keeps it, so that it is compiled once."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from app.settings import Settings
from core.model import kernels
from core.model.config import ModelConfig
from core.model.kv_cache import KVCache
from core.model.transformer import FlatBatch, Transformer, flat_batch
from tests.core.small_models import random_tensors

packed_model = kernels.load(Settings().cache_dir)
from core.model.kernels.packed_cache import PackedKVCache  # noqa: E402  after load, which says where code is kept

BLOCK_SIZE = 16
MAX_POSITIONS = 1200
CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=MAX_POSITIONS,
)
WIDE = replace(CONFIG, hidden_size=128, intermediate_size=192, num_heads=3, num_kv_heads=1, head_dim=64)
TENSORS = {config: random_tensors(config, 1, gain=0.7) for config in (CONFIG, WIDE)}
# Weights and KV cache of each provider, and how far its logits may be from NumPy's, as a share of their spread.
KINDS = {
    ("float32", "float32"): 2e-5,
    ("bfloat16", "bfloat16"): 3e-2,
    ("int8", "bfloat16"): 0.15,
}
Floats = NDArray[np.float32]
Run = tuple[list[int], int, list[int]]  # token ids, position of the first, blocks


def reference(config: ModelConfig = CONFIG) -> Transformer:
    return Transformer(config, TENSORS[config], MAX_POSITIONS)


def packed(dtype: str, config: ModelConfig = CONFIG, num_threads: int = 1):  # type: ignore[no-untyped-def]
    return packed_model.PackedTransformer(config, TENSORS[config], MAX_POSITIONS, dtype=dtype, num_threads=num_threads)


def plain_cache(num_blocks: int, config: ModelConfig = CONFIG, block_size: int = BLOCK_SIZE) -> KVCache:
    return KVCache(config, num_blocks, block_size)


def packed_cache(
    kv_dtype: str, num_blocks: int, config: ModelConfig = CONFIG, block_size: int = BLOCK_SIZE
) -> PackedKVCache:
    return PackedKVCache(config, num_blocks, block_size, kv_dtype)


def batch_of(runs: Sequence[Run], block_size: int = BLOCK_SIZE) -> FlatBatch:
    return flat_batch(runs, block_size)


def last_rows(runs: Sequence[Run]) -> NDArray[np.int64]:
    return np.cumsum([len(tokens) for tokens, _, _ in runs]) - 1
