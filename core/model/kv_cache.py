"""The arrays behind the block tables: keys and values of every slot, for every layer.

Block ids mean the same here as in the block manager; nothing here knows who owns them. A slot is
`block_id * block_size + offset`. A second tier of slots, in memory or in a mapped file, may stand behind: blocks are
copied there and back, whole.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core.errors import NumericalFault
from core.model.config import ModelConfig

Floats = NDArray[np.float32]


class KVCache:
    """keys_LBSGE and values_LBSGE, float32: (layers, blocks, block_size, kv heads, head size).

    Args:
        num_tier_slots: blocks that the second tier holds.
        tier_file: the file it is mapped to, made anew; None for memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        num_tier_slots: int = 0,
        tier_file: Path | None = None,
    ) -> None:
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        # Zeros, not garbage: masked slots are multiplied by 0, and 0 times a NaN would be a NaN.
        self.keys_LBSGE = np.zeros(shape, np.float32)
        self.values_LBSGE = np.zeros(shape, np.float32)
        self.block_size = block_size
        tier_shape = (num_tier_slots, 2, config.num_layers, *shape[2:])
        if tier_file is None or num_tier_slots == 0:
            self._tier: Floats = np.zeros(tier_shape, np.float32)
        else:
            self._tier = np.memmap(tier_file, np.float32, "w+", shape=tier_shape)

    def write(self, layer: int, slots_T: NDArray[np.int64], keys_TGE: Floats, values_TGE: Floats) -> None:
        """Put each token's key and value into its slot.

        Raises:
            NumericalFault: one is not finite. Nothing is written then: a masked slot is multiplied by 0, and a NaN that
                once got into the pool would spoil whoever is given its block next.
        """
        if not (np.isfinite(keys_TGE).all() and np.isfinite(values_TGE).all()):
            raise NumericalFault(f"keys or values of layer {layer} are not finite")
        blocks_T, offsets_T = np.divmod(slots_T, self.block_size)
        self.keys_LBSGE[layer, blocks_T, offsets_T] = keys_TGE
        self.values_LBSGE[layer, blocks_T, offsets_T] = values_TGE

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in order."""
        for source, destination in copies:
            self.keys_LBSGE[:, destination] = self.keys_LBSGE[:, source]
            self.values_LBSGE[:, destination] = self.values_LBSGE[:, source]

    def store(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to the second tier, (block, tier slot)."""
        for block, slot in pairs:
            self._tier[slot, 0] = self.keys_LBSGE[:, block]
            self._tier[slot, 1] = self.values_LBSGE[:, block]

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks back from the second tier, (tier slot, block)."""
        for slot, block in pairs:
            self.keys_LBSGE[:, block] = self._tier[slot, 0]
            self.values_LBSGE[:, block] = self._tier[slot, 1]
