"""What other caches would have hit: one that never forgets, and one of twice the size. Only hashes are kept.

Of all block hashes only those below a threshold are followed (spatial sampling: SHARDS, Waldspurger et al., FAST 2015),
and each stands for `1 / rate` blocks. When too many are kept the threshold halves, so memory is bounded. The relative
standard error of a rate is about 1 / sqrt(sampled blocks looked up); `relative_error` says it.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

MAX_ENTRIES = 65_536
_HASH_SPACE = 2**64


class PrefixGhost:
    """Follows what is looked up and what is published.

    Args:
        block_size: tokens a block.
        num_blocks: of the real pool; the bigger cache has twice as many.
        max_entries: most hashes kept by either cache.
    """

    def __init__(self, block_size: int, num_blocks: int, *, max_entries: int = MAX_ENTRIES) -> None:
        self._block_size = block_size
        self._doubled_blocks = 2 * num_blocks
        self._max_entries = max_entries
        self._threshold = _HASH_SPACE
        self._seen: set[bytes] = set()
        self._recent: OrderedDict[bytes, None] = OrderedDict()  # the bigger cache, least recently used first
        self._num_queried_tokens = 0
        self._num_sampled = 0
        self._infinite_hits = self._doubled_hits = 0.0  # in blocks

    @property
    def rate(self) -> float:
        """Share of hashes that is followed now."""
        return self._threshold / _HASH_SPACE

    @property
    def infinite_hit_rate(self) -> float:
        """Tokens that a cache which never forgets would have hit, over tokens looked up."""
        return self._hit_rate(self._infinite_hits)

    @property
    def doubled_hit_rate(self) -> float:
        """The same for a cache of twice the pool's size."""
        return self._hit_rate(self._doubled_hits)

    @property
    def relative_error(self) -> float:
        """About one standard error of the rates, relative; 0 as long as every hash is followed."""
        return 0.0 if self.rate == 1 or not self._num_sampled else 1 / math.sqrt(self._num_sampled)

    def _hit_rate(self, num_blocks: float) -> float:
        return num_blocks * self._block_size / self._num_queried_tokens if self._num_queried_tokens else 0.0

    def look_up(self, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        """A prompt of `num_tokens` tokens was looked up; these are the blocks it could have hit, in order."""
        self._num_queried_tokens += num_tokens
        sampled = self._sample(block_hashes)
        self._num_sampled += len(sampled)
        self._infinite_hits += sum(h in self._seen for h in sampled) / self.rate
        self._doubled_hits += sum(h in self._recent for h in sampled) / self.rate
        self._touch(h for h in reversed(sampled) if h in self._recent)

    def publish(self, block_hashes: Sequence[bytes]) -> None:
        """These contents exist now, in order of the prefix."""
        sampled = self._sample(block_hashes)
        self._seen.update(sampled)
        self._touch(reversed(sampled))  # tails first, so that they are the first to go
        if len(self._seen) > self._max_entries:
            self._halve()
        while len(self._recent) > max(1, self._doubled_blocks * self.rate):
            self._recent.popitem(last=False)

    def _touch(self, block_hashes: Iterable[bytes]) -> None:
        for block_hash in block_hashes:
            self._recent[block_hash] = None
            self._recent.move_to_end(block_hash)

    def _sample(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        return [h for h in block_hashes if int.from_bytes(h[:8], "big") < self._threshold]

    def _halve(self) -> None:
        self._threshold //= 2
        self._seen = set(self._sample(list(self._seen)))
        self._recent = OrderedDict.fromkeys(self._sample(list(self._recent)))
