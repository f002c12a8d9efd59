"""Static against continuous batching, in steps: the published figures (see docs/theory) come out exactly."""

import heapq
import json
import random
from collections.abc import Sequence
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.scheduling.static_batching import static_batching_steps
from tests.builders import scheduler

AZURE = Path(__file__).resolve().parents[2] / "data" / "azure_conv_lengths.json"


def list_scheduling_steps(output_lens: Sequence[int], max_batch: int) -> int:
    """Each length in turn goes to the place that is free first."""
    ends = [0] * max_batch
    for length in output_lens:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def continuous(output_lens: Sequence[int], max_batch: int) -> tuple[int, list[int]]:
    """(steps, the step in which each ended) of the scheduler with prompts of one token and memory enough."""
    it = scheduler(max_batch, num_blocks=max_batch, block_size=max(output_lens))
    for i, length in enumerate(output_lens):
        it.add(str(i), 1, length)
    ends, num_steps = [0] * len(output_lens), 0
    while it.has_unfinished_requests:
        num_steps += 1
        for name in it.step().finished:
            ends[int(name)] = num_steps
    return num_steps, ends


def static_ends(output_lens: Sequence[int], max_batch: int) -> list[int]:
    """The step in which each group ended, for each of its members."""
    ends, start = [], 0
    for i in range(0, len(output_lens), max_batch):
        group = output_lens[i : i + max_batch]
        start += max(group)
        ends += [start] * len(group)
    return ends


def test_a_group_takes_as_long_as_its_longest():
    assert 9 + 4 + 2 == static_batching_steps([1, 9, 4, 3, 2], 2)
    assert 0 == static_batching_steps([], 4)


@pytest.mark.parametrize(
    ("lens", "max_batch", "message"), [([1], 0, "max_batch is 0"), ([3, -1], 2, "output length -1 is below 0")]
)
def test_what_cannot_be_is_refused(lens: list[int], max_batch: int, message: str):
    with pytest.raises(ValueError, match=message):
        static_batching_steps(lens, max_batch)


@pytest.mark.parametrize(
    ("max_batch", "num_static", "num_continuous"),
    [(4, 103_122, 62_868), (8, 57_955, 31_549), (16, 31_254, 15_916), (32, 17_181, 8_098)],
)
def test_azure_conversations_take_the_published_steps(max_batch: int, num_static: int, num_continuous: int):
    """T2.1: 1024 output lengths in file order; the scheduler needs exactly the list-scheduling number."""
    lens = json.loads(AZURE.read_text())["output_lens"]

    assert 1024 == len(lens)
    assert num_static == static_batching_steps(lens, max_batch)
    assert num_continuous == list_scheduling_steps(lens, max_batch) == continuous(lens, max_batch)[0]


def test_the_fixture_names_its_source_and_licence():
    fixture = json.loads(AZURE.read_text())

    assert "Azure public dataset" in fixture["source"]
    assert "CC-BY 4.0" in fixture["licence"]


@pytest.mark.parametrize("max_batch", [4, 8, 16])
def test_equal_lengths_gain_nothing(max_batch: int):
    """T2.2: ratio 1.000."""
    lens = [16] * 64

    assert static_batching_steps(lens, max_batch) == continuous(lens, max_batch)[0]


def test_a_few_long_answers_among_short_ones_gain_fivefold():
    """T2.3: 90% of length 16 and 10% of 512, 16 places: at least 5.0x in steps, and everybody waits less on average."""
    lens = [16] * 922 + [512] * 102
    random.Random(1).shuffle(lens)
    num_steps, ends = continuous(lens, 16)

    assert static_batching_steps(lens, 16) >= 5.0 * num_steps
    assert sum(ends) < sum(static_ends(lens, 16))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 5))
def test_continuous_batching_is_list_scheduling(lens: list[int], max_batch: int):
    num_steps, _ = continuous(lens, max_batch)

    assert list_scheduling_steps(lens, max_batch) == num_steps <= static_batching_steps(lens, max_batch)
    assert ceil(sum(lens) / max_batch) <= num_steps <= sum(lens) / max_batch + max(lens)
