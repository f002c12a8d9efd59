"""Fault: append takes the next block when the last one still has a slot."""

from core import *  # noqa: F403
from core import BlockManager as CorrectBlockManager


class BlockManager(CorrectBlockManager):
    """One token ahead of the truth from a request's first append on."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self._fault_ahead = set()

    def append(self, request_id, num_tokens=1):
        taken = super().append(request_id, num_tokens + (request_id not in self._fault_ahead))
        if taken is not None:
            self._fault_ahead.add(request_id)
        return taken
