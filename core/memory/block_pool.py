"""Physical KV blocks: who holds them, which may be reused, which goes next.

A block is free when nobody references it, yet a free block keeps its contents until it is taken again (it is then
also "cached"); that is all prefix caching is. Requests and tables are the block manager's affair; here there are
only block ids and hashes. Paged KV: Kwon et al. 2023, arXiv:2309.06180.
"""

from collections import OrderedDict
from collections.abc import Hashable

from core.errors import InvariantViolation


class BlockPool:
    """`num_blocks` blocks with reference counts, an order of reuse, and an index from content hash to block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, at least 1 is needed")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # Next to be taken first. A dict, since a prefix hit takes a block out of the middle.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of_hash: dict[Hashable, int] = {}
        self._hash_of_block: dict[int, Hashable] = {}
        self._draft_filled: set[int] = set()
        self._num_shared = self._num_cached = 0

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose contents a prefix could still hit."""
        return self._num_cached

    @property
    def num_shared_blocks(self) -> int:
        """Blocks with more than one reference."""
        return self._num_shared

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def take(self) -> int:
        """The next free block, with one reference; what it held is forgotten. The caller knows that one is free."""
        block, _ = self._free.popitem(last=False)
        self._num_cached -= block in self._hash_of_block
        self.forget(block)
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference; a cached block comes back to life."""
        self._ref_counts[block] += 1
        if self._ref_counts[block] == 1:
            del self._free[block]
            self._num_cached -= block in self._hash_of_block
        elif self._ref_counts[block] == 2:
            self._num_shared += 1

    def release(self, block: int) -> None:
        """One reference less; without any the block is free, and cached if its contents have a hash."""
        if self._ref_counts[block] == 0:
            raise InvariantViolation(f"block {block} is released but nobody holds it")
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 1:
            self._num_shared -= 1
        elif self._ref_counts[block] == 0:
            self._free[block] = None
            if block in self._hash_of_block:
                self._num_cached += 1
            else:
                # Nothing to keep: reuse it before any block that somebody may still hit.
                self._free.move_to_end(block, last=False)

    def find(self, block_hash: Hashable) -> int | None:
        """The block with these contents, used or free, or None."""
        return self._block_of_hash.get(block_hash)

    def publish(self, block: int, block_hash: Hashable) -> None:
        """Say what a used block holds. If another block holds the same already, that one stays the known one."""
        if self._ref_counts[block] == 0:
            raise InvariantViolation(f"block {block} is published but nobody holds it")
        if block_hash not in self._block_of_hash and block not in self._hash_of_block:
            self._block_of_hash[block_hash] = block
            self._hash_of_block[block] = block_hash

    def mark_draft_filled(self, block: int) -> None:
        """Say that a block holds the draft model's keys and values too."""
        self._draft_filled.add(block)

    def is_draft_filled(self, block: int) -> bool:
        return block in self._draft_filled

    def hash_of(self, block: int) -> Hashable | None:
        """What the block is known to hold, or None."""
        return self._hash_of_block.get(block)

    def forget_hashes(self) -> None:
        """No block can be hit any more; those in use stay in use."""
        self._block_of_hash.clear()
        self._hash_of_block.clear()
        self._num_cached = 0

    def forget(self, block: int) -> None:
        """A used block's contents are about to change: no hash finds it any more."""
        self._draft_filled.discard(block)
        block_hash = self._hash_of_block.pop(block, None)
        if block_hash is not None:
            del self._block_of_hash[block_hash]

    def check_invariants(self) -> None:
        """Raise InvariantViolation unless free + used == total and the books agree with each other."""
        unreferenced = {b for b, count in enumerate(self._ref_counts) if count == 0}
        if unreferenced != set(self._free):
            raise InvariantViolation(f"free list {sorted(self._free)} but unreferenced are {sorted(unreferenced)}")
        if min(self._ref_counts) < 0:
            raise InvariantViolation("a reference count is below 0")
        if self._num_shared != sum(1 for count in self._ref_counts if count > 1):
            raise InvariantViolation(f"{self._num_shared} blocks counted as shared, reference counts say otherwise")
        if {b: h for h, b in self._block_of_hash.items()} != self._hash_of_block:
            raise InvariantViolation("hash index and block hashes disagree")
        if self._num_cached != sum(1 for block in self._hash_of_block if self._ref_counts[block] == 0):
            raise InvariantViolation(f"{self._num_cached} blocks counted as cached, hashes say otherwise")
