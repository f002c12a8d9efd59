"""Fault: fork copies the table and forgets the reference counts, so one holder's free takes the other's blocks."""

from core import *  # noqa: F403
from core import BlockManager as CorrectBlockManager


class BlockManager(CorrectBlockManager):
    """The blocks of both go back with the first that leaves."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self._fault_sharers = []

    def fork(self, parent_id, child_id):
        super().fork(parent_id, child_id)
        self._fault_sharers.append((parent_id, child_id))

    def free(self, request_id):
        super().free(request_id)
        for pair in self._fault_sharers:
            if request_id in pair:
                self._fault_sharers.remove(pair)
                super().free(pair[pair[0] == request_id])
                return
