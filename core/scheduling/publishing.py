"""Blocks become findable: those that a request has filled, by the hashes of what they hold."""

from core.memory.block_manager import BlockManager
from core.memory.prefix_ghost import PrefixGhost
from core.request import Request


class BlockPublisher:
    """Publishes in a BlockManager, and tells the ghost of every block published."""

    def __init__(self, manager: BlockManager, ghost: PrefixGhost | None = None) -> None:
        self._manager = manager
        self._ghost = ghost

    def publish(self, request: Request) -> None:
        """Make the blocks findable that it has filled since the last time, unless it may share none."""
        if request.is_unshareable:
            return
        block_size = self._manager.block_size
        # A stop inside an accepted run leaves tokens with KV that the request does not have.
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // block_size
        if num_full > request.num_published_blocks:
            hashes = request.block_hashes(block_size, num_full)
            self._manager.publish(request.request_id, hashes)
            if self._ghost is not None:
                self._ghost.publish(hashes[request.num_published_blocks :])
            request.num_published_blocks = num_full
        num_filled = min(request.num_draft_computed_tokens // block_size, num_full)
        if num_filled > request.num_draft_filled_blocks:
            self._manager.mark_draft_filled(request.request_id, request.num_draft_filled_blocks, num_filled)
            request.num_draft_filled_blocks = num_filled
