"""May these figures be believed? The checks that are printed with every result, whatever it says.

A load generator that could not keep up, prompts that came from the server's cache, or a tenth of the requests
failing make good-looking numbers. Limits are those other tools settled on; a check that cannot be made says so.
"""

import math
from dataclasses import dataclass

from loadgen.summary import Summary

MAX_RATE_ERROR = 0.02
MAX_SCHEDULE_DELAY_P50_S = 0.010
MAX_SCHEDULE_DELAY_SHARE = 0.05
MAX_LOOP_LAG_P99_S = 0.010
MAX_LITTLE_RESIDUAL = 0.05
MIN_LITTLE_COMPLETIONS = 100  # with fewer, chance alone passes the limit
MAX_CACHED_SHARE = 0.01


@dataclass(frozen=True)
class Check:
    """`is_ok` is None when there was nothing to judge by."""

    name: str
    observed: str
    is_ok: bool | None


def check_validity(summary: Summary) -> list[Check]:
    """All checks, in the order they are printed."""
    return [
        _check_errors(summary),
        *_check_schedule(summary),
        _check_loop_lag(summary),
        _check_window(summary),
        _check_little(summary),
        _check_prompt_tokens(summary),
        _check_output_tokens(summary),
        _check_cache(summary),
    ]


def _check_errors(summary: Summary) -> Check:
    observed = f"{summary.num_failed} of {summary.num_requests} ({summary.error_rate:.1%})"
    return Check("failed requests", observed, summary.num_failed == 0)


def _check_schedule(summary: Summary) -> list[Check]:
    if summary.achieved_rate is None or summary.planned_rate is None:
        return [Check("achieved rate", "no requested rate: the load followed the server", None)]
    error = summary.achieved_rate / summary.planned_rate - 1
    observed = f"{summary.achieved_rate:.4g} of {summary.planned_rate:.4g} req/s ({error:+.1%})"
    rate = Check("achieved rate", observed, abs(error) <= MAX_RATE_ERROR)
    return [rate, _check_schedule_delay(summary)]


def _check_schedule_delay(summary: Summary) -> Check:
    delay, first = summary.latencies["schedule_delay"], summary.latencies["ttft"]
    if delay is None or first is None:
        return Check("schedule delay", "nothing completed", None)
    p50, p99, ttft_p50 = delay.percentile(50).value, delay.percentile(99).value, first.percentile(50).value
    observed = f"p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms = {p99 / ttft_p50:.1%} of TTFT p50"
    is_ok = p50 < MAX_SCHEDULE_DELAY_P50_S and p99 < MAX_SCHEDULE_DELAY_SHARE * ttft_p50
    return Check("schedule delay", observed, is_ok)


def _check_loop_lag(summary: Summary) -> Check:
    if summary.loop_lag is None:
        return Check("client event loop lag", "the run was too short to measure it", None)
    p99 = summary.loop_lag.percentile(99).value
    return Check("client event loop lag", f"p99 {p99 * 1e3:.1f} ms", p99 < MAX_LOOP_LAG_P99_S)


def _check_window(summary: Summary) -> Check:
    if summary.window is None or summary.window_totals is None:
        return Check("steady window", "none: all were sent before one was answered", None)
    share = summary.window.length_s / summary.totals.duration_s if summary.totals.duration_s > 0 else math.nan
    observed = f"{summary.window.length_s:.1f} s ({share:.0%}), {summary.window_totals.num_completed} completions"
    return Check("steady window", observed, None)


def _check_little(summary: Summary) -> Check:
    if summary.little_residual is None:
        return Check("Little's law residual", "no steady window", None)
    if summary.window_totals is None or summary.window_totals.num_completed < MIN_LITTLE_COMPLETIONS:
        return Check("Little's law residual", f"needs {MIN_LITTLE_COMPLETIONS} completions in the window", None)
    residual = summary.little_residual
    return Check("Little's law residual", f"{residual:+.1%}", abs(residual) <= MAX_LITTLE_RESIDUAL)


def _check_prompt_tokens(summary: Summary) -> Check:
    planned, billed = summary.accounting.num_planned_prompt_tokens, summary.accounting.num_billed_prompt_tokens
    if planned is None or billed is None:
        return Check("prompt tokens", "planned or billed number unknown", None)
    return Check("prompt tokens", f"{planned} planned, {billed} billed", planned == billed)


def _check_output_tokens(summary: Summary) -> Check:
    counted, billed = summary.accounting.num_counted_output_tokens, summary.accounting.num_billed_output_tokens
    sources = ", ".join(sorted(summary.accounting.token_sources)) or "nothing"
    if billed is None:
        return Check("output tokens", f"{counted} counted by {sources}, billed number unknown", None)
    return Check("output tokens", f"{counted} counted by {sources}, {billed} billed", counted == billed)


def _check_cache(summary: Summary) -> Check:
    cached, billed = summary.accounting.num_cached_prompt_tokens, summary.accounting.num_billed_prompt_tokens
    if cached is None or not billed:
        return Check("prompt tokens from cache", "the server does not say", None)
    return Check("prompt tokens from cache", f"{cached} ({cached / billed:.1%})", cached / billed < MAX_CACHED_SHARE)
