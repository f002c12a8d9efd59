"""The transformer: its numbers are Llama's, and a request's logits have the same bits in whatever company."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from core.model import linear
from core.model.config import ModelConfig
from core.model.kv_cache import KVCache
from core.model.transformer import Transformer, flat_batch
from tests import oracle
from tests.core.small_models import TARGET, Model, random_tensors

Floats = NDArray[np.float32]
NO_ROWS = np.empty(0, np.int64)


class Bench:
    """A model over a pool; runs requests' tokens as a scheduler would, in blocks strewn over the pool."""

    def __init__(self, model: Transformer, *, block_size: int = 4, num_blocks: int = 512, seed: int = 0) -> None:
        self.model = model
        self.cache = KVCache(model.config, num_blocks, block_size)
        self._free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self._tables: dict[int, list[int]] = {}

    def run(self, work: Sequence[tuple[int, Sequence[int], int, int]]) -> list[Floats]:
        """Compute (request, its tokens, start, end) together; logits of all rows, by request."""
        runs = []
        for request, tokens, start, end in work:
            table = self._tables.setdefault(request, [])
            while len(table) * self.cache.block_size < end:
                table.append(self._free.pop())
            runs.append((tokens[start:end], start, table))
        batch = flat_batch(runs, self.cache.block_size)
        logits_RV = self.model.forward(batch, self.cache, np.arange(len(batch.token_ids_T)))
        return np.split(logits_RV, np.cumsum([end - start for *_, start, end in work])[:-1])

    def forget(self, request: int) -> None:
        """Give its blocks back, so that others write over them."""
        self._free += self._tables.pop(request)


def some_tokens(length: int, seed: int, vocab_size: int = TARGET.vocab_size) -> list[int]:
    return [int(t) for t in np.random.default_rng([length, seed]).integers(0, vocab_size, length)]


MODEL = Model(TARGET, random_tensors(TARGET, 0)).transformer()


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    num_kv_heads = draw(st.integers(1, 3))
    return ModelConfig(
        vocab_size=draw(st.integers(3, 40)),
        hidden_size=draw(st.integers(2, 40)),
        intermediate_size=draw(st.integers(1, 50)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 8)),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        rope_theta=draw(st.sampled_from([100.0, 10000.0, 500000.0])),
        max_position_embeddings=64,
        tie_word_embeddings=draw(st.booleans()),
    )


@given(config=configs(), length=st.integers(1, 40), block_size=st.integers(1, 20), seed=st.integers(0, 99))
def test_equals_the_whole_sequence_forward(config: ModelConfig, length: int, block_size: int, seed: int) -> None:
    tensors = random_tensors(config, seed, gain=1.0)
    tokens = some_tokens(length, seed, config.vocab_size)
    bench = Bench(Transformer(config, tensors), block_size=block_size, num_blocks=64)

    (logits,) = bench.run([(0, tokens, 0, length)])
    assert (length, config.vocab_size) == logits.shape
    np.testing.assert_allclose(oracle.llama_logits(config, tensors, tokens), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [2, 3, 15, 16, 17, 32])
def test_decoding_request_has_the_same_bits_alone_and_at_any_place_of_a_batch(size: int) -> None:
    tokens = some_tokens(21, 0)
    alone = Bench(MODEL)
    alone.run([(0, tokens, 0, 20)])
    (expected,) = alone.run([(0, tokens, 20, 21)])
    others = [some_tokens(5 + i, i) for i in range(1, size)]
    for place in {0, 1, size // 2, size - 1}:
        bench = Bench(MODEL, seed=place)
        order = [*range(1, place + 1), 0, *range(place + 1, size)]
        texts = [tokens, *others]
        bench.run([(i, texts[i], 0, len(texts[i]) - 1) for i in order])
        rows = bench.run([(i, texts[i], len(texts[i]) - 1, len(texts[i])) for i in order])
        assert np.array_equal(expected, rows[place]), place


@given(
    length=st.integers(1, 60),
    cuts=st.lists(st.integers(1, 59), max_size=6),
    neighbours=st.lists(st.integers(1, 40), max_size=4),
    seed=st.integers(0, 99),
)
def test_prompt_has_the_same_bits_whole_and_in_chunks_among_others(
    length: int, cuts: list[int], neighbours: list[int], seed: int
) -> None:
    tokens = some_tokens(length, seed)
    (expected,) = Bench(MODEL).run([(0, tokens, 0, length)])
    bench = Bench(MODEL, seed=seed)
    edges = [0, *sorted({cut for cut in cuts if cut < length}), length]
    for i, (start, end) in enumerate(pairwise(edges)):
        beside = [(100 * i + j, some_tokens(n, j), 0, n) for j, n in enumerate(neighbours, 1)]
        rows = bench.run([*beside[:2], (0, tokens, start, end), *beside[2:]])
        assert np.array_equal(expected[start:end], rows[len(beside[:2])])


def test_recomputed_request_has_the_bits_it_had_before_it_was_preempted() -> None:
    tokens, other = some_tokens(30, 1), some_tokens(40, 2)
    bench = Bench(MODEL, num_blocks=18)
    first = [bench.run([(0, tokens, 0, 17)])[0]]
    first += [bench.run([(0, tokens, i, i + 1)])[0] for i in range(17, 25)]
    bench.forget(0)
    bench.run([(1, other, 0, 40)])  # into the same blocks
    bench.forget(1)
    (again,) = bench.run([(0, tokens, 0, 25)])

    assert np.array_equal(np.concatenate(first), again)
    assert np.array_equal(
        Bench(MODEL).run([(0, tokens, 0, 30)])[0][25:], bench.run([(2, other, 0, 3), (0, tokens, 25, 30)])[1]
    )


def test_rejected_drafts_leave_no_trace() -> None:
    tokens = some_tokens(30, 3)
    (expected,) = Bench(MODEL).run([(0, tokens, 0, 30)])
    bench = Bench(MODEL)
    bench.run([(0, tokens, 0, 12)])
    for position in range(12, 30):
        drafted = [*tokens[: position + 1], *some_tokens(3, position)]
        (rows,) = bench.run([(0, drafted, position, position + 4)])
        assert np.array_equal(expected[position], rows[0])


@pytest.mark.parametrize("rows", [[0], [3, 1], [20, 0, 5, 5], list(range(21)), [20]])
def test_logits_are_of_the_rows_asked_for(rows: list[int]) -> None:
    tokens = some_tokens(21, 4)
    bench = Bench(MODEL)
    (expected,) = bench.run([(0, tokens, 0, 21)])
    batch = flat_batch([(tokens, 0, list(range(6)))], 4)
    cache = KVCache(TARGET, 6, 4)
    assert np.array_equal(expected[rows], MODEL.forward(batch, cache, np.array(rows)))


def test_chunk_that_yields_nothing_computes_no_logits_but_fills_the_cache() -> None:
    tokens = some_tokens(9, 5)
    cache, other = KVCache(TARGET, 4, 4), KVCache(TARGET, 4, 4)
    batch = flat_batch([(tokens, 0, [2, 0, 3])], 4)
    assert (0, TARGET.vocab_size) == MODEL.forward(batch, cache, NO_ROWS).shape
    MODEL.forward(batch, other, np.array([8]))
    assert np.array_equal(other.keys_LBSGE, cache.keys_LBSGE)
    assert cache.keys_LBSGE[:, 3, 0].any()
    assert not cache.keys_LBSGE[:, 1].any()


def test_flat_batch_lays_runs_end_to_end() -> None:
    batch = flat_batch([([7, 8, 9], 3, [5, 2]), ([4], 0, [0])], block_size=4)

    assert [7, 8, 9, 4] == batch.token_ids_T.tolist()
    assert [3, 4, 5, 0] == batch.positions_T.tolist()
    assert [23, 8, 9, 0] == batch.slots_T.tolist()
    assert [(0, 3, 3), (3, 1, 0)] == [(s.row, s.num_tokens, s.position) for s in batch.spans]


def test_extreme_gates_are_zero_without_a_warning() -> None:
    tensors = random_tensors(TARGET, 1)
    for name in tensors:
        if "gate_proj" in name:
            tensors[name] *= 1e4
    tokens = some_tokens(10, 6)
    (logits,) = Bench(Transformer(TARGET, tensors)).run([(0, tokens, 0, 10)])
    assert np.isfinite(logits).all()


class TestControl:
    """The same comparison fails once products depend on how many rows they have."""

    @staticmethod
    def _alone_and_in_batch(model: Transformer) -> tuple[Floats, Floats]:
        tokens, others = some_tokens(21, 0), [some_tokens(21, i) for i in range(1, 24)]
        alone, batch = Bench(model), Bench(model)
        alone.run([(0, tokens, 0, 20)])
        batch.run([(i, text, 0, 20) for i, text in enumerate([tokens, *others])])
        (expected,) = alone.run([(0, tokens, 20, 21)])
        return expected, batch.run([(i, text, 20, 21) for i, text in enumerate([tokens, *others])])[0]

    def test_equal_with_our_products(self) -> None:
        expected, row = self._alone_and_in_batch(Model(TARGET, random_tensors(TARGET, 0)).transformer())
        assert np.array_equal(expected, row)

    def test_differs_when_many_rows_are_added_up_in_another_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As plain BLAS does on the machines we measured, where one row alone goes to another kernel."""
        plain = linear.multiply

        def by_size(x_TK: Floats, weight_KN: Floats, row_tile: int | None) -> Floats:
            if len(x_TK) <= 16:
                return plain(x_TK, weight_KN, row_tile)
            half = len(weight_KN) // 2
            return plain(x_TK[:, :half], weight_KN[:half], 1) + plain(x_TK[:, half:], weight_KN[half:], 1)

        model = Model(TARGET, random_tensors(TARGET, 0)).transformer()
        monkeypatch.setattr(linear, "multiply", by_size)
        expected, row = self._alone_and_in_batch(model)
        assert not np.array_equal(expected, row)
        np.testing.assert_allclose(expected, row, atol=1e-4)
