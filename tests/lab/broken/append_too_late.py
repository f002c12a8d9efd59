"""Fault: append writes one token past a full block before it takes the next."""

from core import *  # noqa: F403
from core import BlockManager as CorrectBlockManager


class BlockManager(CorrectBlockManager):
    """One token behind the truth from a request's first append on."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self._fault_behind = set()

    def append(self, request_id, num_tokens=1):
        if request_id in self._fault_behind:
            return super().append(request_id, num_tokens)
        self.block_table(request_id)  # an unknown id is still refused
        self._fault_behind.add(request_id)
        return super().append(request_id, num_tokens - 1) if num_tokens > 1 else []
