"""The block manager against a plain model: for each request the list of its tokens, and an array of slots.

Every appended token is a number never used before, so a slot that was written by somebody else shows when it is read.
The plan's order is kept as the runner keeps it: copies first, then writes, then whoever reads. Reference counts, what
is free and when memory is short are worked out from the model's own tables.
"""

from collections import Counter
from copy import deepcopy
from itertools import count
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.memory.block_manager import BlockManager

UNWRITTEN = -1
NAMES = "abcde"
picks = st.integers(0, 59)  # one of those that are there, counted modulo


def has_requests(machine: "BlockManagerMachine") -> bool:
    return bool(machine.tokens)


def has_room(machine: "BlockManagerMachine") -> bool:
    return len(machine.tokens) < len(NAMES)


class BlockManagerMachine(RuleBasedStateMachine):
    manager_class: ClassVar[type[BlockManager]] = BlockManager

    @initialize(num_blocks=st.integers(2, 7), block_size=st.integers(1, 4))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.manager = self.manager_class(num_blocks, block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.slots = [UNWRITTEN] * (num_blocks * block_size)
        self.tokens: dict[str, list[int]] = {}
        self.num_written: dict[str, int] = {}
        self.copies: list[tuple[int, int]] = []
        self.prefixes: list[tuple[int, ...]] = []  # contents that were ever published
        self.fresh = count()

    # What must be so, from the model alone

    def ceiling(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def references(self) -> Counter[int]:
        return Counter(block for name in self.tokens for block in self.manager.block_table(name))

    def num_free(self) -> int:
        return self.num_blocks - len(self.references())

    def hashes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """A block's hash is all that stands up to its end."""
        return [tuple(tokens[:end]) for end in range(self.block_size, len(tokens) + 1, self.block_size)]

    def everything(self) -> tuple[object, ...]:
        manager = self.manager
        tables = {name: (manager.block_table(name), manager.num_tokens(name)) for name in self.tokens}
        pool = manager.pool
        references = [pool.ref_count(block) for block in range(self.num_blocks)]
        return tables, references, manager.num_free_blocks, pool.num_cached_blocks, pool.num_shared_blocks

    def settle(self) -> None:
        """Do as the runner does: copies in order, then writes. The copies' sources are pinned until they are made."""
        copies = self.manager.take_copies()
        assert self.copies == copies, "copies are announced as they come due, once"
        for source, _ in copies:
            self.manager.pool.share(source)
        self.manager.check_invariants([source for source, _ in copies])
        for source, destination in copies:
            for offset in range(self.block_size):
                self.slots[destination * self.block_size + offset] = self.slots[source * self.block_size + offset]
            self.manager.pool.release(source)
        self.copies = []
        for name, tokens in self.tokens.items():
            for position in range(self.num_written[name], len(tokens)):
                self.slots[self.slot(name, position)] = tokens[position]
            self.num_written[name] = len(tokens)

    def slot(self, name: str, position: int) -> int:
        block = self.manager.block_table(name)[position // self.block_size]
        return block * self.block_size + position % self.block_size

    # What users do

    def pick(self, number: int) -> str:
        return sorted(self.tokens)[number % len(self.tokens)]

    @precondition(has_room)
    @rule(num_tokens=st.integers(0, 10))
    def allocate(self, num_tokens: int) -> None:
        self.allocate_and_check([next(self.fresh) for _ in range(num_tokens)], [])

    @precondition(lambda self: has_room(self) and self.prefixes)
    @rule(prefix=picks, num_less=st.integers(0, 3), num_more=st.integers(0, 5), has_gap=st.booleans())
    def allocate_by_hashes(self, prefix: int, num_less: int, num_more: int, has_gap: bool) -> None:
        """A published prefix and more; or less, so that the last block is hit although it is not wanted whole.

        With a gap the first block is not known, so that those behind it must not be hit.
        """
        known = list(self.prefixes[prefix % len(self.prefixes)])
        num_less = min(num_less, self.block_size - 1)
        tokens = known[: len(known) - num_less] if num_less else known + [next(self.fresh) for _ in range(num_more)]
        self.settle()
        hashes = self.hashes(known + tokens[len(known) :])
        if has_gap:
            hashes[0] = (next(self.fresh),)
        self.allocate_and_check(tokens, hashes)

    def allocate_and_check(self, tokens: list[int], hashes: list[tuple[int, ...]]) -> None:
        name, num_tokens = next(name for name in NAMES if name not in self.tokens), len(tokens)
        hits = []
        for block_hash in hashes:
            if (block := self.manager.pool.find(block_hash)) is None:
                break
            hits.append(block)
        references, before = self.references(), self.everything()
        num_new = self.ceiling(num_tokens) - len(hits)
        is_short = num_new > self.num_free() - sum(1 for block in hits if not references[block])
        taken = self.manager.allocate(name, num_tokens, block_hashes=hashes)
        assert is_short == (taken is None)
        if taken is None:
            assert before == self.everything()
            return
        assert num_new == len(taken)
        assert hits + taken == self.manager.block_table(name)
        self.tokens[name] = tokens
        self.num_written[name] = min(len(hits) * self.block_size, num_tokens)

    @precondition(has_requests)
    @rule(number=picks, num_tokens=st.integers(0, 5))
    def append(self, number: int, num_tokens: int) -> None:
        name = self.pick(number)
        tokens, table, before = self.tokens[name], self.manager.block_table(name), self.everything()
        must_copy = bool(num_tokens and len(tokens) % self.block_size and self.references()[table[-1]] > 1)
        num_new = self.ceiling(len(tokens) + num_tokens) - self.ceiling(len(tokens)) + must_copy
        assert (num_tokens <= self.manager.max_append(name)) == (num_new <= self.num_free())
        assert num_tokens != 1 or self.manager.needs_block(name) == (num_new > 0)
        taken = self.manager.append(name, num_tokens)
        assert (num_new > before[2]) == (taken is None)
        if taken is None:
            assert before == self.everything()
            return
        assert num_new == len(taken)
        kept = table[:-1] if must_copy else table
        assert kept + taken == self.manager.block_table(name)
        if must_copy:
            self.copies.append((table[-1], taken[0]))
        self.tokens[name] = tokens + [next(self.fresh) for _ in range(num_tokens)]

    @precondition(has_requests)
    @rule(number=picks, num_cut=st.integers(0, 5))
    def truncate(self, number: int, num_cut: int) -> None:
        name = self.pick(number)
        kept = max(0, len(self.tokens[name]) - num_cut)
        table = self.manager.block_table(name)
        self.manager.truncate(name, kept)
        assert table[: self.ceiling(kept)] == self.manager.block_table(name)
        self.tokens[name] = self.tokens[name][:kept]
        self.num_written[name] = min(self.num_written[name], kept)

    @precondition(lambda self: has_requests(self) and has_room(self))
    @rule(number=picks)
    def fork(self, number: int) -> None:
        parent, child = self.pick(number), next(name for name in NAMES if name not in self.tokens)
        self.settle()  # samples are born after their prompt was computed
        num_free = self.manager.num_free_blocks
        self.manager.fork(parent, child)
        assert self.manager.block_table(parent) == self.manager.block_table(child)
        assert num_free == self.manager.num_free_blocks
        self.tokens[child] = list(self.tokens[parent])
        self.num_written[child] = len(self.tokens[child])

    @precondition(has_requests)
    @rule(number=picks)
    def publish(self, number: int) -> None:
        """Hashes of a whole prompt are known before its last block is full; that one is not found yet."""
        name = self.pick(number)
        self.settle()
        hashes = self.hashes(self.tokens[name])
        still_open = (*self.tokens[name], next(self.fresh))
        self.manager.publish(name, [*hashes, still_open])
        assert self.manager.pool.find(still_open) is None
        assert all(self.manager.pool.find(block_hash) is not None for block_hash in hashes)
        self.prefixes += [block_hash for block_hash in hashes if block_hash not in self.prefixes]

    @precondition(has_requests)
    @rule(number=picks, num_cut=st.integers(1, 3))
    def write_over(self, number: int, num_cut: int) -> None:
        """Cut back into what it has published, a request writes on: other contents in the same block."""
        self.publish(number)
        self.truncate(number, num_cut)
        self.append(number, 1)
        self.settle()

    @precondition(has_requests)
    @rule(number=picks)
    def free(self, number: int) -> None:
        """Of what can still be hit, the tail is to be reused first: it is of use only with all that stands before."""
        name = self.pick(number)
        pool, table = self.manager.pool, self.manager.block_table(name)
        cached = [b for b in table if pool.ref_count(b) == 1 and pool.hash_of(b) is not None]
        self.manager.free(name)
        assert cached[::-1] == [block for block in self.order_of_reuse() if block in cached]
        del self.tokens[name], self.num_written[name]

    def order_of_reuse(self) -> list[int]:
        pool = deepcopy(self.manager.pool)
        return [pool.take() for _ in range(pool.num_free_blocks)]

    @precondition(lambda self: self.prefixes)
    @rule()
    def forget_all_hashes(self) -> None:
        """Nothing can be hit any more, and nobody loses a block."""
        before = self.references()
        self.manager.pool.forget_hashes()
        assert before == self.references()
        assert 0 == self.manager.pool.num_cached_blocks
        assert all(self.manager.pool.find(prefix) is None for prefix in self.prefixes)
        self.prefixes = []

    @precondition(has_requests)
    @rule()
    def run_the_step(self) -> None:
        self.settle()

    # What holds after each of them

    @invariant()
    def books_balance(self) -> None:
        manager = self.manager
        manager.check_invariants()
        references = self.references()
        assert [references[b] for b in range(self.num_blocks)] == [
            manager.pool.ref_count(b) for b in range(self.num_blocks)
        ]
        assert self.num_free() == manager.num_free_blocks
        assert self.num_blocks == manager.num_free_blocks + manager.pool.num_used_blocks
        assert sum(1 for n in references.values() if n > 1) == manager.pool.num_shared_blocks

    @invariant()
    def every_slot_read_holds_its_own_token(self) -> None:
        if self.copies:
            return  # a request that waits for its copy reads after it
        for name, tokens in self.tokens.items():
            num_written = self.num_written[name]
            assert tokens[:num_written] == [self.slots[self.slot(name, i)] for i in range(num_written)], name

    @invariant()
    def what_a_hash_finds_holds_what_it_says(self) -> None:
        size = self.block_size
        for prefix in self.prefixes:
            if (block := self.manager.pool.find(prefix)) is not None:
                assert list(prefix[-size:]) == self.slots[block * size : (block + 1) * size]

    @invariant()
    def waste_stays_behind_the_last_token(self) -> None:
        for name, tokens in self.tokens.items():
            assert len(tokens) == self.manager.num_tokens(name)
            num_slots = len(self.manager.block_table(name)) * self.block_size
            assert 0 <= num_slots - len(tokens) <= self.block_size - 1

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.settle()
        self.every_slot_read_holds_its_own_token()
        while self.tokens:
            self.free(0)
        assert self.num_blocks == self.manager.num_free_blocks
        self.manager.check_invariants()
