"""What other caches would have hit: one that never forgets, and one of twice the size. Only hashes are kept.

Of all block hashes only those below a threshold are followed (spatial sampling: SHARDS, Waldspurger et al., FAST 2015),
and each stands for `1 / rate` blocks. When too many are kept the threshold halves, so memory is bounded.

Misses are what is estimated, and hits are the rest. For hits are as unequal as blocks are popular: whether the one
block of a system prompt is among the sampled would decide the rate. But an infinite cache misses each block once, so
that all weigh the same, and the standard error can be stated.
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
        self._num_looked_up = 0  # blocks
        self._infinite_misses = self._doubled_misses = 0.0  # blocks, estimated from those followed
        self._variance = 0.0  # of these estimates

    @property
    def rate(self) -> float:
        """Share of hashes that is followed now."""
        return self._threshold / _HASH_SPACE

    @property
    def infinite_hit_rate(self) -> float:
        """Tokens that a cache which never forgets would have hit, over tokens looked up."""
        return self._hit_rate(self._infinite_misses)

    @property
    def doubled_hit_rate(self) -> float:
        """The same for a cache of twice the pool's size."""
        return self._hit_rate(self._doubled_misses)

    @property
    def standard_error(self) -> float:
        """About one standard error of the two rates, in their own unit; 0 as long as every hash is followed."""
        return self._share(math.sqrt(self._variance))

    def _hit_rate(self, num_misses: float) -> float:
        return self._share(max(0.0, self._num_looked_up - num_misses))

    def _share(self, num_blocks: float) -> float:
        return num_blocks * self._block_size / self._num_queried_tokens if self._num_queried_tokens else 0.0

    def look_up(self, block_hashes: Sequence[bytes], num_tokens: int) -> None:
        """A prompt of `num_tokens` tokens was looked up; these are the blocks it could have hit, in order."""
        self._num_queried_tokens += num_tokens
        self._num_looked_up += len(block_hashes)
        sampled = self._sample(block_hashes)
        num_missed = sum(h not in self._recent for h in sampled)
        self._infinite_misses += sum(h not in self._seen for h in sampled) / self.rate
        self._doubled_misses += num_missed / self.rate
        self._variance += num_missed * (1 - self.rate) / self.rate**2
        self._touch(h for h in reversed(sampled) if h in self._recent)

    def publish(self, block_hashes: Sequence[bytes]) -> None:
        """These contents exist now, in order of the prefix."""
        sampled = self._sample(block_hashes)
        self._seen.update(sampled)
        self._touch(reversed(sampled))  # tails first, so that they are the first to go
        while len(self._seen) > self._max_entries:
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
