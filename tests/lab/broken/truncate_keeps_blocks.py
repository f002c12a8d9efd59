"""Fault: truncate gives nothing back."""

from core import *  # noqa: F403
from core import BlockManager as CorrectBlockManager


class BlockManager(CorrectBlockManager):
    """Rejected drafts hold their blocks for ever."""

    def truncate(self, request_id, num_tokens):
        self.block_table(request_id)  # an unknown id is still refused
