"""What drafts cost and what they bring, measured while serving: times by number of rows, and how often drafts are kept.

Nothing is assumed of machine or models. All measurements fade, so that what changes is noticed; and what lies outside
of all that has been measured counts as the best that it can be, so that it is tried once and known from then on.
"""

from bisect import insort
from collections.abc import Sequence
from itertools import pairwise

_MEMORY = 0.98  # what each measurement leaves of the weight of those before it
_MIN_WEIGHT = 1e-3
_WELL_KNOWN = 4.0  # weight from which on a measurement far above the mean is taken for a disturbance
_MAX_EXCESS = 2.0


class CostCurve:
    """Seconds of a step by its number of rows, as a function that never falls.

    Measurements go into bins: one for every number of rows up to 31, sixteen for every doubling beyond. Where bins
    contradict each other (more rows, less time) neighbours are averaged by their weights. Between bins the curve is
    straight, beyond the largest it is flat, and below the smallest in proportion to rows.
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float, int]] = {}  # bin: mean, weight, number of the last measurement
        self._bins: list[int] = []
        self._num_measured = 0
        self._table: list[float] = []

    @property
    def is_measured(self) -> bool:
        return self._num_measured > 0

    def has(self, num_rows: int) -> bool:
        """True if so many rows have been measured themselves."""
        return _bin_of(num_rows) in self._means

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows took so long; a clock that did not move says nothing."""
        if seconds <= 0:
            return
        self._num_measured += 1
        key = _bin_of(num_rows)
        if key not in self._means:
            insort(self._bins, key)
        mean, _, _ = self._means.get(key, (0.0, 0.0, 0))
        weight = self._weight(key)
        if weight >= _WELL_KNOWN:
            seconds = min(seconds, _MAX_EXCESS * mean)
        weight += 1
        self._means[key] = (mean + (seconds - mean) / weight, weight, self._num_measured)
        self._table = []

    def table(self, num_rows: int) -> Sequence[float]:
        """Seconds for 0, 1, ... rows, at least up to `num_rows`; all 0 before anything is measured."""
        if len(self._table) <= num_rows:
            self._table = self._made_table(num_rows)
        return self._table

    def _made_table(self, num_rows: int) -> list[float]:
        if not self._bins:
            return [0.0] * (num_rows + 1)
        table, start, low = [0.0], 0, 0.0
        for end, high in zip(self._bins, self._levels(), strict=True):
            slope = (high - low) / (end - start)
            table += [low + slope * i for i in range(1, end - start)]
            table.append(high)
            start, low = end, high
        return table + [low] * (num_rows - start)

    def hopes(self, num_rows: int) -> Sequence[float]:
        """The same, hoping that rows come in tiles: up to the middle between two bins as long as at the first of them.

        The middle, so that whoever tries out what is hoped for finds the edge of a tile in few steps.
        """
        table = list(self.table(num_rows))
        for start, end in pairwise(self._bins):
            for rows in range(start + 1, min((start + end) // 2 + 1, end)):
                table[rows] = table[start]
        return table

    def _levels(self) -> list[float]:
        """The bins' means, made monotone by pooling neighbours that contradict each other."""
        pools: list[tuple[float, float, int]] = []  # mean, weight, number of bins
        for key in self._bins:
            mean, weight, size = self._means[key][0], max(self._weight(key), _MIN_WEIGHT), 1
            while pools and pools[-1][0] > mean:
                other, other_weight, other_size = pools.pop()
                mean = (mean * weight + other * other_weight) / (weight + other_weight)
                weight, size = weight + other_weight, size + other_size
            pools.append((mean, weight, size))
        return [mean for mean, _, size in pools for _ in range(size)]

    def _weight(self, key: int) -> float:
        _, weight, last = self._means.get(key, (0.0, 0.0, 0))
        return weight * _MEMORY ** (self._num_measured - last)


def _bin_of(num_rows: int) -> int:
    """The upper edge of its bin."""
    shift = max(0, num_rows.bit_length() - 5)
    return -(-num_rows >> shift) << shift


class Acceptance:
    """How often the draft at each position was kept where those before it were; older verifications count less."""

    def __init__(self, num_positions: int, memory: float, *, kept: float = 0.0, tried: float = 0.0) -> None:
        self._memory = memory
        self._kept = [kept] * num_positions
        self._tried = [tried] * num_positions

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """A verification: it says nothing of drafts behind the first that fell."""
        for i in range(min(num_drafted, num_accepted + 1, len(self._tried))):
            self._tried[i] = self._tried[i] * self._memory + 1
            self._kept[i] = self._kept[i] * self._memory + (i < num_accepted)

    def fade(self, factor: float) -> None:
        """Time has passed: all that was seen counts less, though what is known of a position is never lost."""
        for i, tried in enumerate(self._tried):
            if tried > _MIN_WEIGHT:
                self._kept[i] *= factor
                self._tried[i] = tried * factor

    @property
    def rates(self) -> list[float]:
        """By position; 0 where nothing was tried."""
        return [kept / tried if tried else 0.0 for kept, tried in zip(self._kept, self._tried, strict=True)]

    def rates_with(self, prior: Sequence[float], weight: float, trust: float) -> list[float]:
        """The same, drawn towards `prior` as if that had been seen `weight` times; own trials count `trust` each."""
        return [
            (kept * trust + weight * rate) / (tried * trust + weight)
            for kept, tried, rate in zip(self._kept, self._tried, prior, strict=True)
        ]
