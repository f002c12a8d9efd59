"""Fault: fork takes new blocks for the child instead of sharing the parent's."""

from core import *  # noqa: F403
from core import BlockManager as CorrectBlockManager


class BlockManager(CorrectBlockManager):
    """Right answers at twice the memory."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self._fault_block_size = block_size

    def fork(self, parent_id, child_id):
        self.allocate(child_id, len(self.block_table(parent_id)) * self._fault_block_size)
