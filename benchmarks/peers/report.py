"""What was measured, as Markdown: a row an engine, the ratios, what was run with which flags, and where."""

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.compare import Comparison, Figures


def write_report(comparisons: Sequence[Comparison]) -> str:
    """One table for all, ratios under their pair, then versions and flags."""
    streams = sorted({n for c in comparisons for figure in c.engines for n in figure.tokens_per_s})
    heads = ["engine", *(f"{n} stream{'s' if n > 1 else ''}" for n in streams)]
    lines = [
        f"{machine()}; output tokens/s, medians (lowest to highest)",
        "",
        _row([*heads, "512-token prompt, first token", "start to first answer", "memory"]),
        _row(["---"] * (len(heads) + 3)),
    ]
    for comparison in comparisons:
        lines += [_row(_cells(figure, streams)) for figure in comparison.engines]
        if len(comparison.engines) == 2:
            ours, peer = comparison.engines
            lines.append(_row(_ratio_cells(ours, peer, streams)))
    lines.append("")
    for comparison in comparisons:
        lines += [f"- {f.name}: {f.versions}; `{f.command}`" for f in comparison.engines]
    return "\n".join(lines) + "\n"


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{_cpu_model()}, {cores} cores, {platform.system()} {platform.release().split('-')[0]}"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    kinds = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{model} ({', '.join(kinds)})"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(figure: Figures, streams: Sequence[int]) -> list[str]:
    first = f"{statistics.median(figure.first_token_s):.3f} s" if figure.first_token_s else ""
    return [
        figure.name,
        *(_spread(figure.tokens_per_s.get(n, [])) for n in streams),
        first,
        f"{figure.start_s:.1f} s",
        f"{figure.memory_bytes / 2**30:.2f} GiB",
    ]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def _ratio_cells(ours: Figures, peer: Figures, streams: Sequence[int]) -> list[str]:
    first = _ratio(ours.first_token_s, peer.first_token_s)
    throughput = [_ratio(ours.tokens_per_s.get(n, []), peer.tokens_per_s.get(n, [])) for n in streams]
    return ["ours / theirs, median of pairs", *throughput, first, "", f"{ours.memory_bytes / peer.memory_bytes:.2f} x"]


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    if not ours:
        return ""
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f} x"
