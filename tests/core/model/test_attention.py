"""Attention over block tables: equal to dense attention, and each row's bits its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from core.model.attention import SPLIT_TOKENS, AttentionPlan, Span
from tests import oracle

Floats = NDArray[np.float32]
NUM_GROUPS, GROUP_SIZE, HEAD_SIZE = 2, 3, 8


@dataclass(frozen=True)
class Material:
    """One request: everything that attention could be asked about it."""

    query_THE: Floats
    keys_CGE: Floats
    values_CGE: Floats

    def __len__(self) -> int:
        return len(self.keys_CGE)


def a_sequence(length: int, seed: int, *, groups: int = NUM_GROUPS, group_size: int = GROUP_SIZE) -> Material:
    rng = np.random.default_rng([length, seed])
    return Material(
        rng.standard_normal((length, groups * group_size, HEAD_SIZE), np.float32) * 2,
        rng.standard_normal((length, groups, HEAD_SIZE), np.float32),
        rng.standard_normal((length, groups, HEAD_SIZE), np.float32),
    )


def attend(
    sequences: Sequence[Material], ranges: Sequence[tuple[int, int]], block_size: int, seed: int = 0
) -> list[Floats]:
    """Output rows of each sequence's positions [start, end), from blocks strewn over a pool full of other numbers."""
    rng = np.random.default_rng(seed)
    needed = [-(-end // block_size) for _, end in ranges]
    num_blocks = sum(needed) + 5
    ids = rng.permutation(num_blocks).tolist()
    groups = sequences[0].keys_CGE.shape[1]
    # What lies in blocks and slots that nobody may read must not show.
    keys, values = (np.full((num_blocks, block_size, groups, HEAD_SIZE), x, np.float32) for x in (1e3, -1e5))
    spans, row = [], 0
    for sequence, (start, end), num in zip(sequences, ranges, needed, strict=True):
        table, ids = ids[:num], ids[num:]
        slots = np.array(table)[np.arange(end) // block_size] * block_size + np.arange(end) % block_size
        keys.reshape(-1, groups, HEAD_SIZE)[slots] = sequence.keys_CGE[:end]
        values.reshape(-1, groups, HEAD_SIZE)[slots] = sequence.values_CGE[:end]
        spans.append(Span(row, end - start, start, table))
        row += end - start
    query_THE = np.concatenate([s.query_THE[start:end] for s, (start, end) in zip(sequences, ranges, strict=True)])
    padding = np.full((-row % 16, *query_THE.shape[1:]), 7, np.float32)
    output_THE = AttentionPlan(spans, row, block_size).attend(np.concatenate([query_THE, padding]), keys, values)
    assert not output_THE[row:].any()
    return [output_THE[span.row : span.row + span.num_tokens] for span in spans]


def dense(sequence: Material, start: int, end: int) -> NDArray[np.float64]:
    return oracle.dense_attention(
        sequence.query_THE[start:end], sequence.keys_CGE[:end], sequence.values_CGE[:end], np.arange(start, end)
    )


@st.composite
def ranges(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Spans of 1 to 300 tokens of one to five requests, mostly decoding, at any depth of context."""
    spans = st.tuples(st.integers(0, 400), st.one_of(st.integers(1, 6), st.integers(1, 300)))
    return [(start, start + num) for start, num in draw(st.lists(spans, min_size=1, max_size=5))]


@given(ranges=ranges(), block_size=st.integers(1, 32), groups=st.integers(1, 3), group_size=st.integers(1, 4))
def test_equals_dense_attention(ranges: list[tuple[int, int]], block_size: int, groups: int, group_size: int) -> None:
    sequences = [a_sequence(end, i, groups=groups, group_size=group_size) for i, (_, end) in enumerate(ranges)]
    outputs = attend(sequences, ranges, block_size)
    for sequence, (start, end), output in zip(sequences, ranges, outputs, strict=True):
        np.testing.assert_allclose(dense(sequence, start, end), output, atol=1e-5, rtol=0)


@given(ranges=ranges(), block_size=st.integers(1, 32), seed=st.integers(0, 9))
def test_row_has_the_same_bits_alone_and_in_any_batch(
    ranges: list[tuple[int, int]], block_size: int, seed: int
) -> None:
    """At any row, beside any neighbours, in any physical blocks."""
    sequences = [a_sequence(end, i) for i, (_, end) in enumerate(ranges)]
    together = attend(sequences, ranges, block_size, seed)
    for sequence, (start, end), output in zip(sequences, ranges, together, strict=True):
        assert np.array_equal(attend([sequence], [(start, end)], block_size, seed + 1)[0], output)


@given(
    length=st.integers(1, 420),
    cuts=st.lists(st.integers(1, 419), max_size=6),
    block_size=st.integers(1, 32),
    neighbour=st.integers(1, 200),
)
def test_row_has_the_same_bits_however_a_prompt_is_cut(
    length: int, cuts: list[int], block_size: int, neighbour: int
) -> None:
    sequence, other = a_sequence(length, 0), a_sequence(neighbour, 1)
    whole = attend([sequence], [(0, length)], block_size)[0]
    edges = [0, *sorted({cut for cut in cuts if cut < length}), length]
    for i, (start, end) in enumerate(pairwise(edges)):
        parts = attend([other, sequence], [(neighbour - 1, neighbour), (start, end)], block_size, seed=i)
        assert np.array_equal(whole[start:end], parts[1])


@pytest.mark.parametrize("block_size", [1, 16, 24, 200])
def test_every_position_decoded_by_itself_equals_the_whole(block_size: int) -> None:
    length = 2 * SPLIT_TOKENS + 9
    sequence = a_sequence(length, 3)
    whole = attend([sequence], [(0, length)], block_size)[0]
    for position in (*range(10), *range(SPLIT_TOKENS - 5, SPLIT_TOKENS + 6), length - 1):
        alone = attend([sequence], [(position, position + 1)], block_size)[0]
        assert np.array_equal(whole[position : position + 1], alone), position


def test_drafts_behind_a_token_do_not_change_its_bits() -> None:
    sequence = a_sequence(200, 4)
    for num_drafts in range(8):
        rows = attend([sequence], [(150, 151 + num_drafts)], 16)[0]
        assert np.array_equal(attend([sequence], [(150, 151)], 16)[0], rows[:1])


def test_large_scores_do_not_overflow() -> None:
    sequence = a_sequence(300, 5)
    loud = Material(sequence.query_THE * 100, sequence.keys_CGE * 10, sequence.values_CGE)
    np.testing.assert_allclose(dense(loud, 290, 300), attend([loud], [(290, 300)], 16)[0], atol=1e-3)


def test_position_keeps_its_place_in_the_tile_however_a_prompt_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for AVX2 treat the rows of a product differently; here a product does so visibly."""
    matmul = np.matmul

    def place_dependent(left: Floats, right: Floats) -> Floats:
        result: Floats = matmul(left, right)
        return result * np.linspace(1, 1.1, result.shape[-2], dtype=np.float32)[:, None]

    sequence = a_sequence(40, 6)
    monkeypatch.setattr(np, "matmul", place_dependent)
    whole = attend([sequence], [(0, 40)], 16)[0]
    for start in range(9):
        assert np.array_equal(whole[start:], attend([sequence], [(start, 40)], 16)[0]), start
        assert np.array_equal(whole[start : start + 1], attend([sequence], [(start, start + 1)], 16)[0]), start


def test_product_that_depends_on_the_batch_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = np.matmul

    def size_dependent(left: Floats, right: Floats) -> Floats:
        result: Floats = matmul(left, right)
        return result * np.float32(1 + 1e-6) if len(left) > 1 else result

    sequences = [a_sequence(30, 7), a_sequence(20, 8)]
    monkeypatch.setattr(np, "matmul", size_dependent)
    together = attend(sequences, [(29, 30), (19, 20)], 16)
    assert not np.array_equal(attend(sequences[:1], [(29, 30)], 16)[0], together[0])
