"""The arrays behind the block tables: keys and values of every slot, for every layer.

Block ids mean the same here as in the block manager; nothing here knows who owns them. A slot is
`block_id * block_size + offset`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core.model.config import ModelConfig

Floats = NDArray[np.float32]


class KVCache:
    """keys_LBSGE and values_LBSGE, float32: (layers, blocks, block_size, kv heads, head size)."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        # Zeros, not garbage: masked slots are multiplied by 0, and 0 times a NaN would be a NaN.
        self.keys_LBSGE = np.zeros(shape, np.float32)
        self.values_LBSGE = np.zeros(shape, np.float32)
        self.block_size = block_size

    def write(self, layer: int, slots_T: NDArray[np.int64], keys_TGE: Floats, values_TGE: Floats) -> None:
        """Put each token's key and value into its slot."""
        blocks_T, offsets_T = np.divmod(slots_T, self.block_size)
        self.keys_LBSGE[layer, blocks_T, offsets_T] = keys_TGE
        self.values_LBSGE[layer, blocks_T, offsets_T] = values_TGE

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in order."""
        for source, destination in copies:
            self.keys_LBSGE[:, destination] = self.keys_LBSGE[:, source]
            self.values_LBSGE[:, destination] = self.values_LBSGE[:, source]
