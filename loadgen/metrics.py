"""The definitions: what each latency is, computed from records and nothing else.

Two families. Seen from the moment a request left (`ttft`, `e2el`), and from the moment it was meant to leave
(`_corrected`): only the second counts the time a request could not even be sent because the client or the server
was behind, which is what a user would have waited ("coordinated omission"; G. Tene, wrk2). Token times divide a
gap by the tokens that came with it, so they agree with throughput when a chunk holds several. Failed requests
have no latency. All values are seconds.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from loadgen.record import RequestRecord

FloatArray = npt.NDArray[np.float64]
PERCENTILE_METHOD: Final = "linear"
CONFIDENCE = 0.95


def schedule_delay(record: RequestRecord) -> float:
    """How much later than intended the request left."""
    return record.t_send - record.t_sched


def client_queue(record: RequestRecord) -> float:
    """How long the request waited for a place under the concurrency limit."""
    return record.t_send - record.t_queue


def ttft(record: RequestRecord) -> float | None:
    """Time to first token, from sending."""
    return None if record.t_first is None else record.t_first - record.t_send


def ttft_corrected(record: RequestRecord) -> float | None:
    """Time to first token, from the intended time."""
    return None if record.t_first is None else record.t_first - record.t_sched


def e2el(record: RequestRecord) -> float | None:
    """End-to-end latency: last token, from sending."""
    return None if record.t_last is None else record.t_last - record.t_send


def e2el_corrected(record: RequestRecord) -> float | None:
    """End-to-end latency: last token, from the intended time."""
    return None if record.t_last is None else record.t_last - record.t_sched


def tpot(record: RequestRecord) -> float | None:
    """Time per output token after the first chunk; None when there are no such tokens."""
    if not record.chunks or record.t_first is None or record.t_last is None:
        return None
    num_later = record.num_output_tokens - record.chunks[0].num_tokens
    return (record.t_last - record.t_first) / num_later if num_later > 0 else None


def ntpot(record: RequestRecord) -> float | None:
    """End-to-end latency per output token (the "normalized latency" of the Orca and vLLM papers)."""
    latency = e2el(record)
    return None if latency is None or record.num_output_tokens == 0 else latency / record.num_output_tokens


def icl(record: RequestRecord) -> list[float]:
    """Inter-chunk latencies: the gaps a reader of the stream sees."""
    times = [chunk.time_s for chunk in record.chunks]
    return [later - earlier for earlier, later in pairwise(times)]


def itl(record: RequestRecord) -> list[float]:
    """Inter-token latencies: each gap shared by the tokens that ended it, one value per token."""
    gaps = zip(icl(record), record.chunks[1:], strict=True)
    return [gap / chunk.num_tokens for gap, chunk in gaps for _ in range(chunk.num_tokens)]


def max_stall(record: RequestRecord) -> float | None:
    """The longest gap within the stream, which a mean over its tokens hides."""
    return max(icl(record), default=None)


PER_REQUEST: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft_corrected": ttft_corrected,
    "e2el_corrected": e2el_corrected,
    "ttft": ttft,
    "tpot": tpot,
    "e2el": e2el,
    "ntpot": ntpot,
    "max_stall": max_stall,
    "schedule_delay": schedule_delay,
    "client_queue": client_queue,
}
POOLED: dict[str, Callable[[RequestRecord], list[float]]] = {"itl": itl, "icl": icl}
METRIC_NAMES = (*PER_REQUEST, *POOLED)


@dataclass(frozen=True)
class Percentile:
    """An order statistic; the interval is None where the sample does not reach far enough, or is not independent."""

    value: float
    interval: tuple[float, float] | None
    is_resolved: bool


@dataclass(frozen=True)
class Distribution:
    """One metric over the successful requests, sorted; `num_undefined` had no value and are in no figure.

    Values pooled from within requests are not independent, and get no interval.
    """

    ordered: FloatArray
    num_undefined: int
    is_independent: bool

    @property
    def num_samples(self) -> int:
        return len(self.ordered)

    @property
    def mean(self) -> float:
        return float(self.ordered.mean())

    @property
    def std(self) -> float:
        return float(self.ordered.std())

    @property
    def min(self) -> float:
        return float(self.ordered[0])

    @property
    def max(self) -> float:
        return float(self.ordered[-1])

    def percentile(self, percent: float) -> Percentile:
        value = float(np.percentile(self.ordered, percent, method=PERCENTILE_METHOD))
        is_resolved = self.num_samples >= min_samples(percent)
        interval = order_statistic_interval(self.ordered, percent) if self.is_independent else None
        return Percentile(value, interval, is_resolved)


def measure(name: str, records: Iterable[RequestRecord]) -> Distribution | None:
    """The distribution of a metric over the requests that succeeded; None when nothing has a value."""
    successes = [record for record in records if record.is_ok]
    if name in POOLED:
        pooled = [gap for record in successes for gap in POOLED[name](record)]
        return distribution(pooled, is_independent=False)
    values = [PER_REQUEST[name](record) for record in successes]
    defined = [value for value in values if value is not None]
    return distribution(defined, num_undefined=len(values) - len(defined))


def distribution(
    values: Sequence[float], *, num_undefined: int = 0, is_independent: bool = True
) -> Distribution | None:
    """None when there is nothing to take a mean of."""
    if not values:
        return None
    return Distribution(np.sort(np.asarray(values, dtype=np.float64)), num_undefined, is_independent)


def min_samples(percent: float) -> int:
    """The smallest sample that a two-sided 95% interval of this percentile lies within: 368 for p99."""
    share = max(percent, 100.0 - percent) / 100.0
    return math.ceil(math.log((1 - CONFIDENCE) / 2) / math.log(share))


def order_statistic_interval(ordered: FloatArray, percent: float) -> tuple[float, float] | None:
    """A 95% interval for a percentile that assumes nothing about the law: two members of the sorted sample.

    How many of N samples lie below the true percentile is binomial, so the interval runs from the sample whose
    rank is that binomial's lower quantile to the one at its upper quantile.
    """
    num, share = len(ordered), percent / 100.0
    if num < min_samples(percent):
        return None
    below = np.arange(num)
    log_ratios = np.log((num - below) / (below + 1)) + math.log(share / (1 - share))
    log_masses = num * math.log1p(-share) + np.concatenate([[0.0], np.cumsum(log_ratios)])
    cumulative = np.cumsum(np.exp(log_masses))
    tail = (1 - CONFIDENCE) / 2
    # The largest rank l with P(B < l) <= tail, and the smallest u with P(B < u) >= 1 - tail; ranks count from 1.
    low = int(np.searchsorted(cumulative, tail, side="right"))
    high = int(np.searchsorted(cumulative, 1 - tail, side="left")) + 1
    return float(ordered[low - 1]), float(ordered[high - 1])


def achieved_rate(records: Iterable[RequestRecord], horizon_s: float) -> float:
    """Requests sent per second of the schedule, which ends later by as much as its last request left late."""
    sent = [record for record in records if record.was_sent]
    if not sent or horizon_s <= 0:
        return math.nan
    last = max(sent, key=lambda record: record.t_sched)
    return len(sent) / (horizon_s + schedule_delay(last))


@dataclass(frozen=True)
class Window:
    """The steady part of a run: from the first completion, when the server has filled, to the last send."""

    start: float
    end: float

    @property
    def length_s(self) -> float:
        return self.end - self.start

    def completions(self, records: Iterable[RequestRecord]) -> list[RequestRecord]:
        """The successes whose last token fell inside."""
        return [r for r in records if r.is_ok and r.t_last is not None and self.start < r.t_last <= self.end]


def steady_window(records: Sequence[RequestRecord]) -> Window | None:
    """None when the last request left before the first was answered, so that there is no steady part."""
    ends = [record.t_last for record in records if record.is_ok and record.t_last is not None]
    sends = [record.t_send for record in records if record.was_sent]
    if not ends or max(sends) <= min(ends):
        return None
    return Window(min(ends), max(sends))


def little_residual(records: Sequence[RequestRecord], window: Window) -> float | None:
    """(L - lambda W) / L over the window: near 0 if it was steady. Over a whole run it would be 0 by construction."""
    spans = [(r.t_send, r.t_last) for r in records if r.is_ok and r.t_last is not None]
    overlaps = [max(0.0, min(end, window.end) - max(start, window.start)) for start, end in spans]
    num_in_flight = sum(overlaps) / window.length_s
    latencies = [latency for r in window.completions(records) if (latency := e2el(r)) is not None]
    if num_in_flight == 0 or not latencies:
        return None
    # lambda W = (completions / length) * (sum of latencies / completions)
    return (num_in_flight - sum(latencies) / window.length_s) / num_in_flight


def meets(record: RequestRecord, limits_s: dict[str, float]) -> bool:
    """Whether a request kept every limit. A failed one keeps none; an undefined metric breaks none."""
    values = ((PER_REQUEST[name](record), limit_s) for name, limit_s in limits_s.items())
    return record.is_ok and all(value is None or value <= limit_s for value, limit_s in values)
