"""Fault: an append of several tokens that fails keeps the ones that still fitted."""

from core import *  # noqa: F403
from core import BlockManager as CorrectBlockManager


class BlockManager(CorrectBlockManager):
    """Goes token by token."""

    def append(self, request_id, num_tokens=1):
        taken = []
        for _ in range(num_tokens):
            more = super().append(request_id)
            if more is None:
                return None
            taken.extend(more)
        return taken
