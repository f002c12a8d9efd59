"""The result for people (a table) and for programs (a JSON file).

When a rate was requested, latency from the intended time comes first: the other one flatters a server that
falls behind. A percentile that the sample is too small for is not printed as if it were known. Keys of the file are
those of vLLM's `bench serve` where they mean the same; times are in milliseconds there as here.
"""

import json
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from loadgen.benchmark import BenchResult
from loadgen.metrics import PERCENTILE_METHOD, Distribution, Percentile, min_samples
from loadgen.options import BenchOptions
from loadgen.server_metrics import ServerMetrics
from loadgen.summary import Summary, Totals
from loadgen.validity import Check, check_validity

CORRECTED = {"ttft": "ttft_corrected", "e2el": "e2el_corrected"}
MARKS = {True: "[green]ok[/]", False: "[bold red]FAILS[/]", None: "-"}


def print_report(console: Console, result: BenchResult, summary: Summary) -> None:
    """Headline, latencies, failures, what the server said, and whether to believe it."""
    options = result.options
    console.print(_headline(result, summary))
    if summary.totals.num_completed:
        console.print(_latency_table(summary, options))
    if summary.failures:
        console.print(_failure_table(result, summary))
    if summary.server is not None:
        console.print(_server_lines(summary.server))
    console.print(_validity_panel(check_validity(summary)))


def _headline(result: BenchResult, summary: Summary) -> str:
    options, totals = result.options, summary.totals
    lines = [
        f"[bold]{escape(result.model)}[/] at {options.base_url}{options.endpoint}",
        f"{_load(options)}, seed {options.seed}",
        f"{totals.num_completed} completed, {summary.num_failed} failed in {totals.duration_s:.2f} s",
        f"whole run:     {_rates(totals)}",
    ]
    if summary.window_totals is not None:
        lines.append(f"steady window: {_rates(summary.window_totals)}")
    if summary.goodput is not None:
        limits = ", ".join(f"{name} {limit_s * 1e3:g} ms" for name, limit_s in options.goodput_s.items())
        goodput = summary.goodput
        lines.append(f"goodput:       {goodput.requests_per_s:.2f} req/s, {goodput.fraction:.1%} within {limits}")
    return "\n".join(lines)


def _load(options: BenchOptions) -> str:
    limit = "" if options.max_concurrency is None else f"at most {options.max_concurrency} in flight"
    if options.is_burst:
        return "all at once"
    if not options.is_open_loop:
        return f"closed loop, {limit}"
    law = options.arrival_law + (f" (burstiness {options.burstiness:g})" if options.arrival_law == "gamma" else "")
    return ", ".join(filter(None, [f"open loop, {options.request_rate:g} req/s {law}", limit]))


def _rates(totals: Totals) -> str:
    return (
        f"{totals.request_rate:.2f} req/s, {totals.output_rate:.1f} output tok/s, {totals.token_rate:.1f} total tok/s"
    )


def shown_metrics(options: BenchOptions) -> list[str]:
    """The selected metrics; when a rate was requested, those from the intended time first."""
    names = list(options.percentile_metrics)
    if not options.is_open_loop:
        return names
    corrected = [CORRECTED[name] for name in names if name in CORRECTED]
    return list(dict.fromkeys([*corrected, *names]))


def _latency_table(summary: Summary, options: BenchOptions) -> Table:
    table = Table(title="latency in ms, whole run, successful requests", title_justify="left")
    for heading in ("", "mean", *(f"p{percent:g}" for percent in options.metric_percentiles), "max", "N"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name in shown_metrics(options):
        found = summary.latencies[name]
        if found is not None:
            table.add_row(f"[bold]{name}[/]" if name in CORRECTED.values() else name, *_cells(found, options))
    needed = [f"p{p:g}: {min_samples(p)}" for p in options.metric_percentiles]
    table.caption = f"n/r: not resolved, N too small (needed for {', '.join(needed)}); {PERCENTILE_METHOD} percentiles"
    return table


def _cells(found: Distribution, options: BenchOptions) -> list[str]:
    percentiles = [found.percentile(percent) for percent in options.metric_percentiles]
    count = f"{found.num_samples}" + (f" ({found.num_undefined} undefined)" if found.num_undefined else "")
    return [_ms(found.mean), *(_ms(p.value) if p.is_resolved else "n/r" for p in percentiles), _ms(found.max), count]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _failure_table(result: BenchResult, summary: Summary) -> Table:
    table = Table("failed", "requests", "first detail", title="failures (in no mean above)", title_justify="left")
    for kind, count in sorted(summary.failures.items()):
        details = (r.failure.detail for r in result.run.records if r.failure and r.failure.kind == kind)
        table.add_row(kind, str(count), escape(next(details)))
    return table


def _server_lines(server: ServerMetrics) -> str:
    if server.is_absent:
        return "server metrics: absent (no known series at /metrics)"
    rate = server.acceptance_rate
    accepted = "absent" if server.num_draft_tokens is None else "nothing drafted"
    if rate is not None:
        accepted = f"{rate:.3f} ({server.num_accepted_tokens:.0f} of {server.num_draft_tokens:.0f} draft tokens)"
    length = "absent" if server.num_drafts is None else "nothing drafted"
    if server.acceptance_length is not None:
        length = f"{server.acceptance_length:.3f} tokens a step ({server.num_drafts:.0f} steps with drafts)"
    blocks = [server.kv_blocks_free_before, server.kv_blocks_free_after, server.kv_blocks]
    before, after, total = ("absent" if value is None else f"{value:.0f}" for value in blocks)
    preemptions = "absent" if server.num_preemptions is None else f"{server.num_preemptions:.0f}"
    return (
        f"acceptance rate:   {accepted}\n"
        f"acceptance length: {length}\n"
        f"free KV blocks:    {before} before, {after} after, of {total}\n"
        f"preemptions:       {preemptions}"
    )


def _validity_panel(checks: Iterable[Check]) -> Panel:
    grid = Table.grid(padding=(0, 2))
    for check in checks:
        grid.add_row(check.name, check.observed, MARKS[check.is_ok])
    return Panel(grid, title="validity", title_align="left", expand=False)


def result_json(result: BenchResult, summary: Summary, *, is_detailed: bool = False) -> dict[str, Any]:
    """What --save-result writes."""
    options, totals = result.options, summary.totals
    document: dict[str, Any] = {
        **options.metadata,  # first: what was measured is not to be overwritten
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "label": options.label,
        "model_id": result.model,
        "num_prompts": summary.num_requests,
        "request_rate": options.request_rate if options.is_open_loop else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "completed": totals.num_completed,
        "failed": summary.num_failed,
        "failures": summary.failures,
        "planned_rate": summary.planned_rate,
        "achieved_rate": summary.achieved_rate,
        **_totals_json(totals),
        "headline": [name for name in shown_metrics(options) if name in CORRECTED.values()] or ["ttft", "e2el"],
        "percentile_method": PERCENTILE_METHOD,
        **_latencies_json(summary.latencies, options),
        "steady_window": _window_json(summary, options),
        "goodput": summary.goodput and asdict(summary.goodput),
        "server": _server_json(summary.server),
        **_acceptance_json(summary.server),
        "accounting": asdict(summary.accounting),
        "validity": [asdict(check) for check in check_validity(summary)],
        "options": _options_json(options),
        "environment": _environment(),
    }
    if is_detailed:
        document["requests"] = [asdict(record) for record in sorted(result.run.records, key=lambda r: r.index)]
    return document


def _totals_json(totals: Totals) -> dict[str, Any]:
    return {
        "duration": totals.duration_s,
        "total_input_tokens": totals.num_input_tokens,
        "total_output_tokens": totals.num_output_tokens,
        "request_throughput": totals.request_rate,
        "output_throughput": totals.output_rate,
        "total_token_throughput": totals.token_rate,
    }


def _latencies_json(latencies: dict[str, Distribution | None], options: BenchOptions) -> dict[str, Any]:
    """Flat keys as other tools have them (mean_ttft_ms, p99_ttft_ms), intervals, and which are not resolved."""
    flat: dict[str, Any] = {}
    unresolved: list[str] = []
    for name, found in latencies.items():
        if found is None:
            continue
        flat |= {f"mean_{name}_ms": found.mean * 1e3, f"std_{name}_ms": found.std * 1e3}
        flat |= {f"min_{name}_ms": found.min * 1e3, f"max_{name}_ms": found.max * 1e3}
        flat |= {f"num_{name}": found.num_samples, f"num_undefined_{name}": found.num_undefined}
        flat[f"median_{name}_ms"] = found.percentile(50).value * 1e3
        for percent in options.metric_percentiles:
            key, percentile = f"p{percent:g}_{name}_ms", found.percentile(percent)
            flat |= _percentile_json(key, percentile)
            unresolved += [] if percentile.is_resolved else [key]
    return {**flat, "not_resolved": unresolved}


def _percentile_json(key: str, percentile: Percentile) -> dict[str, Any]:
    value: dict[str, Any] = {key: percentile.value * 1e3}
    if percentile.interval is not None:
        value[f"{key}_ci95"] = [bound * 1e3 for bound in percentile.interval]
    return value


def _window_json(summary: Summary, options: BenchOptions) -> dict[str, Any] | None:
    if summary.window_totals is None:
        return None
    return {
        "completed": summary.window_totals.num_completed,
        "little_residual": summary.little_residual,
        **_totals_json(summary.window_totals),
        **_latencies_json(summary.window_latencies, options),
    }


def _server_json(server: ServerMetrics | None) -> dict[str, Any] | None:
    if server is None:
        return None
    return {
        **asdict(server),
        "acceptance_rate": server.acceptance_rate,
        "acceptance_length": server.acceptance_length,
    }


def _acceptance_json(server: ServerMetrics | None) -> dict[str, Any]:
    """vLLM's keys, which are there when something was drafted; its rate is in percent."""
    if server is None or server.acceptance_rate is None or server.acceptance_length is None:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * server.acceptance_rate,
        "spec_decode_acceptance_length": server.acceptance_length,
        "spec_decode_num_drafts": server.num_drafts,
        "spec_decode_draft_tokens": server.num_draft_tokens,
        "spec_decode_accepted_tokens": server.num_accepted_tokens,
    }


def _options_json(options: BenchOptions) -> dict[str, Any]:
    """Without headers: they may hold a key, and a result is made to be passed on."""
    fields = {key: value for key, value in asdict(options).items() if key != "headers"}
    path = options.dataset_path
    return {**fields, "request_rate": str(options.request_rate), "dataset_path": path and str(path)}


def _environment() -> dict[str, Any]:
    try:
        own_version = version("octavo")
    except PackageNotFoundError:
        own_version = "unknown"
    return {
        "octavo": own_version,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
    }


def save_result(path: Path, document: dict[str, Any]) -> None:
    """One JSON document, strict: a figure that is not a number becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(document), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
