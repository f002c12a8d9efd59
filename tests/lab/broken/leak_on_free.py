"""Fault: free keeps one of the blocks."""

from itertools import count

from core import *  # noqa: F403
from core import BlockManager as CorrectBlockManager

leaks = count()


class BlockManager(CorrectBlockManager):
    """Loses a block with every request that goes."""

    def free(self, request_id):
        super().free(request_id)
        self.allocate(f"leaked {next(leaks)}", 1)
