"""All free blocks in one hand, so that nobody but the oldest request gets any; for tests of a full pool."""

from collections.abc import Iterable

from core.memory.block_manager import BlockManager, blocks_needed
from core.request import Request

_HOLDER = object()  # holds blocks in the block manager as a request would; equal to no request's id


class BlockHold:
    """Takes blocks of a BlockManager; off at first. While on, it wants a `renew` whenever others took or gave some."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self.is_on = False

    def turn_on(self) -> None:
        """From the next `renew` on, nobody gets a block but the oldest request, which goes on."""
        self.is_on = True

    def turn_off(self) -> None:
        """Give back what it holds; if it is off, nothing."""
        if self._manager.holds(_HOLDER):
            self._manager.free(_HOLDER)
        self.is_on = False

    def renew(self, requests: Iterable[Request]) -> None:
        """Take all free blocks but those that the oldest of the requests needs for its next step."""
        manager = self._manager
        if not manager.holds(_HOLDER):
            manager.allocate(_HOLDER, 0)
        num_more = manager.num_free_blocks - self._num_blocks_for(min(requests, key=lambda r: r.age, default=None))
        if num_more < 0:
            manager.truncate(_HOLDER, max(0, manager.num_tokens(_HOLDER) + num_more * manager.block_size))
        else:
            manager.append(_HOLDER, num_more * manager.block_size)

    def _num_blocks_for(self, oldest: Request | None) -> int:
        """Blocks that it lacks for all its tokens and one more."""
        if oldest is None:
            return 0
        manager = self._manager
        num_own = len(manager.block_table(oldest.request_id)) if manager.holds(oldest.request_id) else 0
        return max(0, blocks_needed(oldest.num_tokens + 1, manager.block_size) - num_own)
