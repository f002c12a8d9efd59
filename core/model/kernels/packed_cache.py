"""Keys and values of every slot in the layout that `attention` reads, with the interface of `KVCache`.

Block ids mean the same as everywhere. A block is a multiple of 16 tokens: for each key/value head a panel of keys,
elements by tokens, and the values, tokens by elements; in bfloat16 two numbers share a word.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.model.config import ModelConfig
from core.model.kernels.packing import VALUES_A_WORD, WORD_DTYPES, Words, aligned

LANES = 16


class CacheArrays(NamedTuple):
    """keys (L, B, G, block_size / 16, words of a head, 16), values (L, B, G, block_size / values a word, E) and the
    values by single elements."""

    keys: Words
    values: Words
    value_slots: NDArray[np.float32] | NDArray[np.uint16]


class PackedKVCache:
    """Keys and values of every slot, as `attention` reads them. Interface of `KVCache`."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: str,
        *,
        num_tier_slots: int = 0,
        tier_file: Path | None = None,
    ) -> None:
        per, word = VALUES_A_WORD[dtype], WORD_DTYPES[dtype]
        lead = (config.num_layers, num_blocks, config.num_kv_heads)
        self.block_size = block_size
        self.dtype = dtype
        keys = aligned((*lead, block_size // LANES, config.head_dim // per, LANES), word)
        values = aligned((*lead, block_size // per, config.head_dim), word)
        slots = values if per == 1 else values.view(np.uint16).reshape(*values.shape, 2)
        self.arrays = CacheArrays(keys, values, slots)
        tier_shape = (num_tier_slots, 2, config.num_layers, keys[0, 0].size)
        if tier_file is None or num_tier_slots == 0:
            self._tier = np.zeros(tier_shape, word)
        else:
            self._tier = np.memmap(tier_file, word, "w+", shape=tier_shape)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in order."""
        for source, destination in copies:
            for array in (self.arrays.keys, self.arrays.values):
                array[:, destination] = array[:, source]

    def store(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to the second tier, (block, tier slot)."""
        for block, slot in pairs:
            for half, array in enumerate((self.arrays.keys, self.arrays.values)):
                self._tier[slot, half] = array[:, block].reshape(len(array), -1)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks back from the second tier, (tier slot, block)."""
        for slot, block in pairs:
            for half, array in enumerate((self.arrays.keys, self.arrays.values)):
                array[:, block] = self._tier[slot, half].reshape(array[:, block].shape)
