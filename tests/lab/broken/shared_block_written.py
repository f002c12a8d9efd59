"""Fault: a request that shares its last block writes into it, without a copy."""

from core import *  # noqa: F403
from core import BlockManager as CorrectBlockManager


class BlockManager(CorrectBlockManager):
    """Shows the shared block wherever the correct manager made a copy."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self._fault_copies = {}  # the source of each copy

    def append(self, request_id, num_tokens=1):
        before = super().block_table(request_id)
        taken = super().append(request_id, num_tokens)
        after = super().block_table(request_id)
        self._fault_copies.update((copy, source) for source, copy in zip(before, after, strict=False) if copy != source)
        return taken

    def block_table(self, request_id):
        return [self._fault_copies.get(block, block) for block in super().block_table(request_id)]
