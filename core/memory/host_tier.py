"""The second tier of the KV cache, as integers: which contents lie in which of its slots, and which go first.

Preemption by swap puts a request's full blocks here under their content hashes; whoever needs the same contents
later, the request itself or another with the same prefix, has them copied back instead of computed. The arrays are
`core.model.kv_cache`'s affair. A plan that preempts admits nobody, so no plan both fills a slot and reads it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierEntry:
    """One block's contents in the tier. `is_draft_filled`: the draft model's keys and values are there too."""

    slot: int
    is_draft_filled: bool


class HostTier:
    """`num_slots` places for blocks, least recently used first to go."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}, at least 1 is needed")
        self.num_slots = num_slots
        self._entries: OrderedDict[bytes, TierEntry] = OrderedDict()
        self._free = list(reversed(range(num_slots)))

    @property
    def num_used_slots(self) -> int:
        return len(self._entries)

    def find(self, block_hash: bytes) -> TierEntry | None:
        """The entry with these contents, from now on the most recently used; or None."""
        entry = self._entries.get(block_hash)
        if entry is not None:
            self._entries.move_to_end(block_hash)
        return entry

    def leading_hits(self, block_hashes: Sequence[bytes]) -> list[TierEntry]:
        """Entries of the leading ones of these contents that are here."""
        hits: list[TierEntry] = []
        for block_hash in block_hashes:
            entry = self.find(block_hash)
            if entry is None:
                break
            hits.append(entry)
        return hits

    def store(self, block_hash: bytes, *, is_draft_filled: bool) -> int | None:
        """The slot to copy a block's contents to, at the cost of the least recently used; None if they are here."""
        if self.find(block_hash) is not None:
            return None
        if not self._free:
            _, oldest = self._entries.popitem(last=False)
            self._free.append(oldest.slot)
        slot = self._free.pop()
        self._entries[block_hash] = TierEntry(slot, is_draft_filled)
        return slot

    def forget(self, slots: set[int]) -> None:
        """Drop what was to be in these slots: nobody knows whether it got there."""
        for block_hash in [h for h, entry in self._entries.items() if entry.slot in slots]:
            self._free.append(self._entries.pop(block_hash).slot)

    def clear(self) -> None:
        """Forget all contents."""
        self._free.extend(entry.slot for entry in self._entries.values())
        self._entries.clear()
