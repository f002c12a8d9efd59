"""A run in figures: everything the table prints and the file holds, computed from the records.

Totals and latencies are of successful requests; failures are counted by kind beside them. Each latency is given
over the whole run and over the steady window.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.benchmark import BenchResult
from loadgen.metrics import (
    METRIC_NAMES,
    Distribution,
    Window,
    achieved_rate,
    distribution,
    little_residual,
    measure,
    meets,
    steady_window,
)
from loadgen.record import RequestRecord
from loadgen.server_metrics import ServerMetrics


@dataclass(frozen=True)
class Goodput:
    """What kept all its limits; failures are misses."""

    requests_per_s: float
    tokens_per_s: float
    fraction: float


@dataclass(frozen=True)
class Totals:
    """Sums over a part of the run."""

    num_completed: int
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int

    @property
    def request_rate(self) -> float:
        return self._per_second(self.num_completed)

    @property
    def output_rate(self) -> float:
        return self._per_second(self.num_output_tokens)

    @property
    def token_rate(self) -> float:
        return self._per_second(self.num_input_tokens + self.num_output_tokens)

    def _per_second(self, amount: float) -> float:
        return amount / self.duration_s if self.duration_s > 0 else math.nan


@dataclass(frozen=True)
class Accounting:
    """Sums that must agree if client and server mean the same; None where one side does not say."""

    num_planned_prompt_tokens: int | None
    num_billed_prompt_tokens: int | None
    num_cached_prompt_tokens: int | None
    num_counted_output_tokens: int
    num_billed_output_tokens: int | None
    token_sources: dict[str, int]


@dataclass(frozen=True)
class Summary:
    """The whole result. `window` and what depends on it are None when the run had no steady part."""

    num_requests: int
    failures: dict[str, int]
    totals: Totals
    latencies: dict[str, Distribution | None]
    window: Window | None
    window_totals: Totals | None
    window_latencies: dict[str, Distribution | None]
    little_residual: float | None
    planned_rate: float | None
    achieved_rate: float | None
    loop_lag: Distribution | None
    accounting: Accounting
    goodput: Goodput | None
    server: ServerMetrics | None

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def error_rate(self) -> float:
        return self.num_failed / self.num_requests if self.num_requests else 0.0


def summarize(result: BenchResult) -> Summary:
    """All figures of a run."""
    records, options, schedule = result.run.records, result.options, result.schedule
    successes = [record for record in records if record.is_ok]
    window = steady_window(records)
    within = window.completions(records) if window else []
    is_open = schedule is not None and options.is_open_loop
    return Summary(
        num_requests=len(records),
        failures=dict(Counter(record.failure.kind for record in records if record.failure)),
        totals=_totals(successes, result.run.duration_s),
        latencies=_latencies(records),
        window=window,
        window_totals=_totals(within, window.length_s) if window else None,
        window_latencies=_latencies(within) if window else {},
        little_residual=little_residual(records, window) if window else None,
        planned_rate=schedule.planned_rate if schedule and is_open else None,
        achieved_rate=achieved_rate(records, schedule.horizon_s) if schedule and is_open else None,
        loop_lag=distribution(result.run.loop_lags_s, is_independent=False),
        accounting=_account(successes),
        goodput=_goodput(records, dict(options.goodput_s), result.run.duration_s),
        server=result.server,
    )


def _latencies(records: Sequence[RequestRecord]) -> dict[str, Distribution | None]:
    return {name: measure(name, records) for name in METRIC_NAMES}


def _totals(successes: Sequence[RequestRecord], duration_s: float) -> Totals:
    prompt_tokens = (r.num_prompt_tokens or r.num_planned_prompt_tokens or 0 for r in successes)
    return Totals(
        num_completed=len(successes),
        duration_s=duration_s,
        num_input_tokens=sum(prompt_tokens),
        num_output_tokens=sum(record.num_output_tokens for record in successes),
    )


def _account(successes: Sequence[RequestRecord]) -> Accounting:
    return Accounting(
        num_planned_prompt_tokens=_sum_known([r.num_planned_prompt_tokens for r in successes]),
        num_billed_prompt_tokens=_sum_known([r.num_prompt_tokens for r in successes]),
        num_cached_prompt_tokens=_sum_known([r.num_cached_tokens for r in successes]),
        num_counted_output_tokens=sum(r.num_output_tokens for r in successes),
        num_billed_output_tokens=_sum_known([r.num_billed_output_tokens for r in successes]),
        token_sources=dict(Counter(r.token_source for r in successes)),
    )


def _sum_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _goodput(records: Sequence[RequestRecord], limits_s: dict[str, float], duration_s: float) -> Goodput | None:
    if not limits_s or not records or duration_s <= 0:
        return None
    good = [record for record in records if meets(record, limits_s)]
    return Goodput(
        requests_per_s=len(good) / duration_s,
        tokens_per_s=sum(record.num_output_tokens for record in good) / duration_s,
        fraction=len(good) / len(records),
    )
