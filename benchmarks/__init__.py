"""Measurements, each a command: `python -m benchmarks.startup`. What they gave is written down in docs/log.md.

A benchmark says how busy the machine was: with others at work on it, times are no measurements of ours.
"""

import os
import statistics
from collections.abc import Sequence


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Names on the left, values on the right."""
    width = max(len(name) for name, _ in rows)
    print(title)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def load_line() -> tuple[str, str]:
    """A row on how busy the machine is: processes that wanted to run in the last minute, and cores for them."""
    return "machine", f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"


def median_and_range(values: Sequence[float], unit: str, digits: int = 2) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} {unit} ({low} to {high})"
