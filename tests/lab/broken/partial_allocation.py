"""Fault: an allocation that fails keeps what it had taken before memory ran out."""

from core import *  # noqa: F403
from core import BlockManager as CorrectBlockManager


class BlockManager(CorrectBlockManager):
    """Takes blocks first and counts afterwards."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self._fault_block_size = block_size

    def allocate(self, request_id, num_tokens, **options):
        taken = super().allocate(request_id, num_tokens, **options)
        if taken is None:
            super().allocate(request_id, self.num_free_blocks * self._fault_block_size)
        return taken
