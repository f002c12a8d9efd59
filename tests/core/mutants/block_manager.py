"""Block managers that are wrong in one way each. The machine must tell every one of them from the real one.

AppendsTooLate              the first token of a new block is put behind the end of a full one
AppendsTooEarly             a block is taken when the last slot is filled, not when the next token needs one
AllocatesOneTooMany         an exact multiple gets a block more
LeaksOnTruncate             blocks behind the cut leave the table and stay referenced
TruncatesIntoTheKept        one block too many is given back
FreesSharedBlocks           free does not ask whether somebody else still reads the block
LeaksOnFree                 the first block stays referenced
WritesSharedBlocks          whoever diverges writes without a copy of its own
ForgetsCopies               the copy is taken, but nobody is told to fill it
KeepsTheCopysSource         the writer's old block keeps its reference
ForksWithoutReferences      the child shares blocks that nobody counts
AllocatesInPart             out of memory, yet the free blocks are gone
AppendsInPart               out of memory, yet the tokens count
CountsCachedBlocksTwice     a hit on a free block is not counted against what is free
PublishesPartialBlocks      a block is findable before it is full
KeepsStaleHashes            a block that is written again is found by its old contents
HitsBehindAGap              a later block is shared although an earlier one was not found
ForksAReferenceTooFew       only the child's last block is not counted
FreesHeadsFirst             the beginning of a prefix is reused before what stands behind it
CopiesForTheLastReader      whoever is left alone with a block copies it all the same
"""

from collections.abc import Hashable, Sequence

from core.memory.block_manager import BlockManager, blocks_needed


class AppendsTooLate(BlockManager):
    def append(self, request_id: Hashable, num_tokens: int = 1) -> list[int] | None:
        if num_tokens == 1 and self._tables[request_id] and self._num_tokens[request_id] % self.block_size == 0:
            self._num_tokens[request_id] += 1
            return []
        return super().append(request_id, num_tokens)


class AppendsTooEarly(BlockManager):
    def append(self, request_id: Hashable, num_tokens: int = 1) -> list[int] | None:
        taken = super().append(request_id, num_tokens)
        if taken is not None and num_tokens and self._num_tokens[request_id] % self.block_size == 0:
            if not self.num_free_blocks:
                return taken
            taken.append(self.pool.take())
            self._tables[request_id].append(taken[-1])
        return taken


class AllocatesOneTooMany(BlockManager):
    def allocate(
        self, request_id: Hashable, num_tokens: int, *, block_hashes: Sequence[Hashable] = ()
    ) -> list[int] | None:
        taken = super().allocate(request_id, num_tokens, block_hashes=block_hashes)
        if taken is not None and num_tokens % self.block_size == 0 and self.num_free_blocks:
            taken.append(self.pool.take())
            self._tables[request_id].append(taken[-1])
        return taken


class LeaksOnTruncate(BlockManager):
    def truncate(self, request_id: Hashable, num_tokens: int) -> None:
        del self._tables[request_id][blocks_needed(num_tokens, self.block_size) :]
        self._num_tokens[request_id] = num_tokens


class TruncatesIntoTheKept(BlockManager):
    def truncate(self, request_id: Hashable, num_tokens: int) -> None:
        super().truncate(request_id, num_tokens)
        if num_tokens % self.block_size == 1:
            self.pool.release(self._tables[request_id].pop())


class FreesSharedBlocks(BlockManager):
    def free(self, request_id: Hashable) -> None:
        for block in self._tables.pop(request_id):
            while self.pool.ref_count(block):
                self.pool.release(block)
        del self._num_tokens[request_id]


class LeaksOnFree(BlockManager):
    def free(self, request_id: Hashable) -> None:
        del self._tables[request_id][:1]
        super().free(request_id)


class WritesSharedBlocks(BlockManager):
    def _writes_shared_block(self, request_id: Hashable) -> bool:
        return False


class ForgetsCopies(BlockManager):
    def take_copies(self) -> list[tuple[int, int]]:
        super().take_copies()
        return []


class KeepsTheCopysSource(BlockManager):
    def _copy_last_block(self, table: list[int]) -> int:
        source = table[-1]
        copy = super()._copy_last_block(table)
        self.pool.share(source)
        return copy


class ForksWithoutReferences(BlockManager):
    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        self._tables[child_id] = list(self._tables[parent_id])
        self._num_tokens[child_id] = self._num_tokens[parent_id]


class AllocatesInPart(BlockManager):
    def allocate(
        self, request_id: Hashable, num_tokens: int, *, block_hashes: Sequence[Hashable] = ()
    ) -> list[int] | None:
        taken = super().allocate(request_id, num_tokens, block_hashes=block_hashes)
        while taken is None and self.num_free_blocks:
            self.pool.take()
        return taken


class AppendsInPart(BlockManager):
    def append(self, request_id: Hashable, num_tokens: int = 1) -> list[int] | None:
        taken = super().append(request_id, num_tokens)
        if taken is None:
            self._num_tokens[request_id] += -self._num_tokens[request_id] % self.block_size
        return taken


class CountsCachedBlocksTwice(BlockManager):
    def allocate(
        self, request_id: Hashable, num_tokens: int, *, block_hashes: Sequence[Hashable] = ()
    ) -> list[int] | None:
        needed = blocks_needed(num_tokens, self.block_size)
        hits = self._leading_hits(block_hashes[:needed])
        if needed - len(hits) > self.num_free_blocks:
            return None
        for block in hits:
            self.pool.share(block)
        taken = [self.pool.take() for _ in range(needed - len(hits))]
        self._tables[request_id], self._num_tokens[request_id] = hits + taken, num_tokens
        return taken


class PublishesPartialBlocks(BlockManager):
    def publish(self, request_id: Hashable, block_hashes: Sequence[Hashable]) -> None:
        super().publish(request_id, block_hashes)
        if self._num_tokens[request_id] % self.block_size and block_hashes:
            self.pool.publish(self._tables[request_id][-1], block_hashes[-1])


class KeepsStaleHashes(BlockManager):
    def append(self, request_id: Hashable, num_tokens: int = 1) -> list[int] | None:
        hashes = dict(self.pool._hash_of_block)
        last = self._tables[request_id][-1:]
        taken = super().append(request_id, num_tokens)
        for block in last:
            if block in hashes and self.pool.ref_count(block) and self.pool.find(hashes[block]) is None:
                self.pool.publish(block, hashes[block])
        return taken


class HitsBehindAGap(BlockManager):
    def _leading_hits(self, block_hashes: Sequence[Hashable]) -> list[int]:
        return [block for h in block_hashes if (block := self.pool.find(h)) is not None]


class ForksAReferenceTooFew(BlockManager):
    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        super().fork(parent_id, child_id)
        if self._tables[child_id]:
            self.pool.release(self._tables[child_id][-1])


class FreesHeadsFirst(BlockManager):
    def free(self, request_id: Hashable) -> None:
        self._table(request_id).reverse()
        super().free(request_id)


class CopiesForTheLastReader(BlockManager):
    def _writes_shared_block(self, request_id: Hashable) -> bool:
        return self._has_partial_block(request_id)


MUTANTS: list[type[BlockManager]] = [
    AppendsTooLate,
    AppendsTooEarly,
    AllocatesOneTooMany,
    LeaksOnTruncate,
    TruncatesIntoTheKept,
    FreesSharedBlocks,
    LeaksOnFree,
    WritesSharedBlocks,
    ForgetsCopies,
    KeepsTheCopysSource,
    ForksWithoutReferences,
    AllocatesInPart,
    AppendsInPart,
    CountsCachedBlocksTwice,
    PublishesPartialBlocks,
    KeepsStaleHashes,
    HitsBehindAGap,
    ForksAReferenceTooFew,
    FreesHeadsFirst,
    CopiesForTheLastReader,
]
