"""The soak's verdict: what it calls flat, and that each thing that may grow is seen when it does."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.soak import Figures, judge

FLAT = Figures(
    seconds=0, num_requests=0, memory_mb=200, num_tasks=5, num_files=12, num_blocks_used=0, num_blocks_free=512
)


def readings(name: str, values: Sequence[float]) -> list[Figures]:
    """Readings every 20 s in which one figure takes these values."""
    changes: list[dict[str, Any]] = [{name: value, "seconds": 20.0 * i} for i, value in enumerate(values, 1)]
    return [replace(FLAT, **change) for change in changes]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("memory_mb", [100, 180, 200, 200, 205, 210, 202]),
        ("num_tasks", [3, 9, 5, 7, 5, 5]),
        ("num_files", [9, 30, 12, 12, 14, 12]),
        ("num_blocks_used", [3, 2, 0, 0, 0]),
    ],
)
def test_what_settles_after_the_first_minute_is_flat(name: str, values: list[float]):
    assert [] == judge(readings(name, values))


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("memory_mb", [100, 180, 200, 210, 220, 240], "memory was 200 MB and is 240 MB"),
        ("num_tasks", [5, 5, 5, 6, 7, 8], "num_tasks was 5, and 6 or more"),
        ("num_files", [12, 12, 12, 14, 13], "num_files was 12, and 13 or more"),
        ("num_blocks_used", [0, 0, 0, 1, 0], "1 blocks used at 80 s"),
        ("memory_mb", [200, 200, 200, 200], "2 readings behind the warm-up"),
    ],
)
def test_what_grows_is_named(name: str, values: list[float], words: str):
    (wrong,) = judge(readings(name, values))

    assert wrong.startswith(words)
