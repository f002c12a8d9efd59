"""Which request's tokens live in which blocks: the paged KV cache, as integers.

A request's KV lies in fixed blocks anywhere in the pool; its block table lists them in order. So memory is wasted only
behind the last token of each request (fewer than `block_size` slots), blocks can be shared, and running short is a
value, `None`, with nothing changed. Source: Kwon et al. 2023, arXiv:2309.06180.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from core.errors import DuplicateRequest, InvariantViolation, UnknownRequest
from core.memory.block_pool import BlockPool


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens: the ceiling of their quotient.

    Raises:
        ValueError: num_tokens below 0 or block_size below 1.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens is {num_tokens}, at least 0 is needed")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, at least 1 is needed")
    return -(-num_tokens // block_size)


class Fragmentation(NamedTuple):
    """KV slots reserved but not filled: by paging, and by reserving the longest length for everyone."""

    paged_waste: int
    naive_waste: int


def kv_cache_blocks_fragmentation(seq_lens: Sequence[int], block_size: int) -> Fragmentation:
    """Token slots wasted on sequences of these lengths, paged against naive.

    Paged allocation rounds each length up to whole blocks; naive allocation reserves max(seq_lens) for each.

    Raises:
        ValueError: a length below 0 or block_size below 1.
    """
    num_tokens = sum(seq_lens)
    blocks_needed(0, block_size)  # refuses a block without slots, also when there are no lengths
    paged_slots = sum(blocks_needed(length, block_size) for length in seq_lens) * block_size
    naive_slots = max(seq_lens, default=0) * len(seq_lens)
    return Fragmentation(paged_slots - num_tokens, naive_slots - num_tokens)


class BlockManager:
    """Block tables over a pool of `num_blocks` blocks of `block_size` token slots.

    A call that returns None has changed nothing. Unknown ids raise UnknownRequest, ids in use DuplicateRequest.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, at least 1 is needed")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._tables: dict[Hashable, list[int]] = {}
        self._num_tokens: dict[Hashable, int] = {}
        self._copies: list[tuple[int, int]] = []

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that allocate could take now."""
        return self.pool.num_free_blocks

    def block_table(self, request_id: Hashable) -> list[int]:
        """The request's blocks in order: token t lies in block `table[t // block_size]`."""
        return list(self._table(request_id))

    def num_tokens(self, request_id: Hashable) -> int:
        """Token slots in use, or reserved, by the request."""
        self._table(request_id)
        return self._num_tokens[request_id]

    def allocate(
        self, request_id: Hashable, num_tokens: int, *, block_hashes: Sequence[Hashable] = ()
    ) -> list[int] | None:
        """Give a new request the blocks for its first `num_tokens` tokens.

        Args:
            block_hashes: content hashes of its leading full blocks; those known to the pool are shared, not taken.

        Returns:
            The ids taken, cached hits not among them; None if memory does not suffice.
        """
        if request_id in self._tables:
            raise DuplicateRequest(f"request {request_id!r} has blocks already")
        needed = blocks_needed(num_tokens, self.block_size)
        hits = self._leading_hits(block_hashes[:needed])
        num_revived = sum(1 for block in hits if self.pool.ref_count(block) == 0)
        if needed - len(hits) > self.pool.num_free_blocks - num_revived:
            return None
        for block in hits:
            self.pool.share(block)
        taken = [self.pool.take() for _ in range(needed - len(hits))]
        self._tables[request_id] = hits + taken
        self._num_tokens[request_id] = num_tokens
        return taken

    def _leading_hits(self, block_hashes: Sequence[Hashable]) -> list[int]:
        hits: list[int] = []
        for block_hash in block_hashes:
            block = self.pool.find(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def append(self, request_id: Hashable, num_tokens: int = 1) -> list[int] | None:
        """Make room for `num_tokens` more tokens; a new block is taken only when the last one is exactly full.

        If the last block is partly filled and shared, the request gets a copy of its own first (see take_copies).

        Returns:
            The ids taken, [] if the tokens fit the last block; None if memory does not suffice.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}, at least 0 is needed")
        table = self._table(request_id)
        used = self._num_tokens[request_id]
        total = used + num_tokens
        writes_partial = used % self.block_size != 0 and num_tokens > 0
        must_copy = writes_partial and self.pool.ref_count(table[-1]) > 1
        num_new = blocks_needed(total, self.block_size) - len(table)
        if num_new + must_copy > self.pool.num_free_blocks:
            return None
        taken = [self._copy_last_block(table)] if must_copy else []
        if writes_partial and not must_copy:
            # After a truncate, or a hit on more than it needed, it writes over contents that were published.
            self.pool.forget(table[-1])
        self._num_tokens[request_id] = total
        if num_new == 0:
            return taken
        fresh = [self.pool.take() for _ in range(num_new)]
        table.extend(fresh)
        return taken + fresh

    def max_append(self, request_id: Hashable) -> int:
        """Most tokens that append could make room for now."""
        self._table(request_id)
        spare = -self._num_tokens[request_id] % self.block_size
        num_free = self.pool.num_free_blocks
        if self._writes_shared_block(request_id):
            if num_free == 0:
                return 0
            num_free -= 1
        return spare + num_free * self.block_size

    def needs_block(self, request_id: Hashable) -> bool:
        """True if one token more would take a block: a new one, or a copy of a last one that is shared."""
        return not self._has_partial_block(request_id) or self._writes_shared_block(request_id)

    def _writes_shared_block(self, request_id: Hashable) -> bool:
        return self._has_partial_block(request_id) and self.pool.ref_count(self._tables[request_id][-1]) > 1

    def _has_partial_block(self, request_id: Hashable) -> bool:
        return self._num_tokens[request_id] % self.block_size != 0

    def _copy_last_block(self, table: list[int]) -> int:
        source, copy = table[-1], self.pool.take()
        table[-1] = copy
        self.pool.release(source)
        self._copies.append((source, copy))
        return copy

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) of block copies that must be made before anyone writes; the list is handed over.

        Whoever takes it keeps each source alive (`pool.share`) until its contents have been copied.
        """
        copies, self._copies = self._copies, []
        return copies

    def truncate(self, request_id: Hashable, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens and give back the blocks behind them, tail first.

        Raises:
            ValueError: the request has fewer tokens than that.
        """
        table = self._table(request_id)
        if not 0 <= num_tokens <= self._num_tokens[request_id]:
            raise ValueError(
                f"cannot truncate to {num_tokens} tokens, {request_id!r} has {self._num_tokens[request_id]}"
            )
        for _ in range(len(table) - blocks_needed(num_tokens, self.block_size)):
            self.pool.release(table.pop())
        self._num_tokens[request_id] = num_tokens

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Give `child_id` the same tokens in the same blocks, shared; whoever diverges first copies."""
        table = self._table(parent_id)
        if child_id in self._tables:
            raise DuplicateRequest(f"request {child_id!r} has blocks already")
        for block in table:
            self.pool.share(block)
        self._tables[child_id] = list(table)
        self._num_tokens[child_id] = self._num_tokens[parent_id]

    def publish(self, request_id: Hashable, block_hashes: Sequence[Hashable]) -> None:
        """Make the request's leading full blocks findable by these hashes; their contents must exist by now."""
        num_full = self.num_tokens(request_id) // self.block_size
        for block, block_hash in zip(self._tables[request_id][:num_full], block_hashes, strict=False):
            self.pool.publish(block, block_hash)

    def num_known(self, block_hashes: Sequence[Hashable]) -> int:
        """How many leading ones of these contents the pool holds."""
        return len(self._leading_hits(block_hashes))

    def num_in_use(self, block_hashes: Sequence[Hashable]) -> int:
        """Of contents that the pool holds, how many lie in blocks that somebody uses: sharing those costs nothing."""
        blocks = [self.pool.find(block_hash) for block_hash in block_hashes]
        return sum(1 for block in blocks if block is not None and self.pool.ref_count(block) > 0)

    def mark_draft_filled(self, request_id: Hashable, first: int, end: int) -> None:
        """Say that the request's blocks [first, end) hold the draft model's keys and values too."""
        for block in self._table(request_id)[first:end]:
            self.pool.mark_draft_filled(block)

    def num_draft_filled(self, request_id: Hashable) -> int:
        """The request's leading blocks that hold the draft model's keys and values."""
        filled = itertools.takewhile(self.pool.is_draft_filled, self._table(request_id))
        return sum(1 for _ in filled)

    def num_wasted_slots(self) -> int:
        """Slots in used blocks that hold no token: behind the last token of each last block."""
        fill: dict[int, int] = {}
        for request_id, table in self._tables.items():
            spare = -self._num_tokens[request_id] % self.block_size
            if spare:
                fill[table[-1]] = min(spare, fill.get(table[-1], self.block_size))
        return sum(fill.values())

    def holds(self, request_id: Hashable) -> bool:
        """True if the request has a table here."""
        return request_id in self._tables

    def free(self, request_id: Hashable) -> None:
        """Give back all its blocks."""
        table = self._table(request_id)
        # Tail first: a tail block extends the longest prefix, so it is the least likely to be asked for again.
        for block in reversed(table):
            self.pool.release(block)
        del self._tables[request_id], self._num_tokens[request_id]

    def _table(self, request_id: Hashable) -> list[int]:
        try:
            return self._tables[request_id]
        except KeyError:
            raise UnknownRequest(f"request {request_id!r} has no blocks") from None

    def check_invariants(self, pinned: Sequence[int] = ()) -> None:
        """Raise InvariantViolation unless references equal table membership and every table fits its tokens.

        Args:
            pinned: blocks that somebody holds beside the tables (sources of copies under way).
        """
        self.pool.check_invariants()
        held = Counter(block for table in self._tables.values() for block in table)
        held.update(pinned)
        for block in range(self.num_blocks):
            if held[block] != self.pool.ref_count(block):
                raise InvariantViolation(
                    f"block {block} stands in {held[block]} tables but has {self.pool.ref_count(block)} references"
                )
        for request_id, table in self._tables.items():
            if len(table) != blocks_needed(self._num_tokens[request_id], self.block_size):
                raise InvariantViolation(
                    f"{request_id!r} has {self._num_tokens[request_id]} tokens in {len(table)} blocks"
                    f" of {self.block_size}"
                )
            if len(set(table)) != len(table):
                raise InvariantViolation(f"{request_id!r} has a block twice: {table}")
