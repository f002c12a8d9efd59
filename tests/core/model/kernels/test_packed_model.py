"""The compiled pass against NumPy's, whatever lies in the batch; and against itself, bit for bit."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from core.errors import NumericalFault
from core.model import linear, transformer
from core.model.kernels.packed_cache import PackedKVCache
from tests.core.model.kernels.provider import (
    CONFIG,
    KINDS,
    MAX_POSITIONS,
    TENSORS,
    WIDE,
    Run,
    batch_of,
    last_rows,
    packed,
    packed_cache,
    packed_model,
    plain_cache,
    reference,
)

NUM_BLOCKS = 90
Floats = NDArray[np.float32]
kinds = pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS, ids=str)


def tokens(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, num).tolist()  # type: ignore[no-any-return]


def blocks(num_tokens: int, pool: list[int], block_size: int = 16) -> list[int]:
    return [pool.pop() for _ in range(-(-num_tokens // block_size))]


def shuffled_pool(seed: int, num_blocks: int = NUM_BLOCKS) -> list[int]:
    return np.random.default_rng(seed).permutation(num_blocks).tolist()  # type: ignore[no-any-return]


def distance(expected: Floats, actual: Floats) -> float:
    """Largest difference as a share of the spread of what is expected."""
    return float(np.abs(expected - actual).max() / expected.std())


@st.composite
def a_step(draw: st.DrawFn) -> tuple[list[Run], list[Run]]:
    """Contexts of one to many tokens in scattered blocks, one of them shared; then a step of runs behind them."""
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    pool = shuffled_pool(draw(st.integers(0, 99)))
    contexts: list[Run] = [(tokens(n, i), 0, blocks(n + 20, pool)) for i, n in enumerate(lengths)]
    behind = [draw(st.integers(1, 20)) for _ in lengths]
    step: list[Run] = [
        (tokens(more, 50 + i), n, table)
        for i, (n, more, (_, _, table)) in enumerate(zip(lengths, behind, contexts, strict=True))
    ]
    shared = lengths[0] // 16  # whole blocks of the first that another request reads too
    if shared:
        step.append((tokens(3, 99), shared * 16, contexts[0][2][:shared] + blocks(3, pool)))
    return contexts, step


@kinds
@given(a_step())
@settings(max_examples=25)
def test_logits_are_the_references_within_the_rounding(dtype: str, kv_dtype: str, runs: tuple[list[Run], list[Run]]):
    models = ((reference(), plain_cache(NUM_BLOCKS)), (packed(dtype), packed_cache(kv_dtype, NUM_BLOCKS)))
    expected, actual = [
        np.concatenate([model.forward(batch_of(part), cache, last_rows(part)) for part in runs])
        for model, cache in models
    ]
    assert distance(expected, actual) < KINDS[dtype, kv_dtype]


@kinds
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_thousand_tokens_and_heads_of_another_width(dtype: str, kv_dtype: str, block_size: int) -> None:
    run: list[Run] = [(tokens(1000, 3), 0, shuffled_pool(1, 70))]
    batch, rows = batch_of(run, block_size), np.array([0, 1, 500, 999])
    expected = reference(WIDE).forward(batch, plain_cache(70, WIDE, block_size), rows)
    actual = packed(dtype, WIDE).forward(batch, packed_cache(kv_dtype, 70, WIDE, block_size), rows)
    assert distance(expected, actual) < KINDS[dtype, kv_dtype]


def in_pieces(model: Any, cache: Any, pieces: Sequence[Sequence[Run]]) -> Floats:
    """Logits of the last row of each run of the last piece; the pieces are passed one after another."""
    for piece in pieces:
        logits: Floats = model.forward(batch_of(piece), cache, last_rows(piece))
    return logits


TEXT = tokens(200, 7)
TABLE = shuffled_pool(4)[:13]
FREE = [block for block in range(NUM_BLOCKS) if block not in TABLE]
OTHERS: list[Run] = [(tokens(n, n), 0, FREE[9 * i : 9 * i + 9]) for i, n in enumerate((1, 17, 33, 130))]


def ways() -> dict[str, list[list[Run]]]:
    """The same 200 tokens computed in many ways; the last run of the last piece ends with the last of them."""
    whole: Run = (TEXT, 0, TABLE)
    elsewhere: Run = (TEXT, 0, TABLE[::-1])
    return {
        "alone": [[whole]],
        "in a batch": [[*OTHERS, whole]],
        "in other blocks": [[elsewhere]],
        "in chunks": [
            [(TEXT[:63], 0, TABLE)],
            [*OTHERS[:2], (TEXT[63:101], 63, TABLE)],
            [(TEXT[101:], 101, TABLE)],
        ],
        "token by token at the end": [
            [(TEXT[:190], 0, TABLE)],
            *([(TEXT[i : i + 1], i, TABLE)] for i in range(190, 200)),
        ],
        "as drafts under test": [[(TEXT[:195], 0, TABLE)], [*OTHERS, (TEXT[195:], 195, TABLE)]],
        "again after all was lost": [[(TEXT[:120], 0, TABLE[::-1])], [whole]],
    }


def ways_that_differ(make: Callable[[], tuple[Any, Any]]) -> list[str]:
    answers = {way: in_pieces(*make(), pieces)[-1] for way, pieces in ways().items()}
    return [way for way, logits in answers.items() if not np.array_equal(answers["alone"], logits)]


@kinds
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_rows_bits_do_not_depend_on_how_it_was_computed(dtype: str, kv_dtype: str, num_threads: int) -> None:
    assert [] == ways_that_differ(lambda: (packed(dtype, num_threads=num_threads), packed_cache(kv_dtype, NUM_BLOCKS)))


def test_numpys_rows_keep_their_bits_only_while_the_order_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same matrix, with the care for row classes and without: it must notice."""

    def make() -> tuple[Any, Any]:
        return reference(), plain_cache(NUM_BLOCKS)

    assert [] == ways_that_differ(make)
    monkeypatch.setattr(transformer, "pad_rows", lambda rows: rows)
    monkeypatch.setattr(linear, "find_row_tile", lambda weight: None)
    assert [] != ways_that_differ(make)


def test_equal_rows_of_logits_have_equal_bits_in_any_number() -> None:
    model = packed("bfloat16")
    row_D = np.random.default_rng(0).standard_normal(CONFIG.hidden_size).astype(np.float32)
    expected = model.logits(row_D[None])[0]
    for num in (2, 3, 5, 12, 13, 64, 200):
        assert (expected == model.logits(np.tile(row_D, (num, 1)))).all()


def spoilt(name: str, dtype: str) -> Any:
    """A model with a NaN among the weights of that name."""
    tensor = TENSORS[CONFIG][name].copy()
    tensor[..., 3] = np.nan
    return packed_model.PackedTransformer(CONFIG, TENSORS[CONFIG] | {name: tensor}, MAX_POSITIONS, dtype=dtype)


@kinds
@pytest.mark.parametrize("part", ["self_attn.v_proj", "self_attn.k_proj", "input_layernorm"])
def test_a_value_that_is_not_finite_is_named_and_not_stored(dtype: str, kv_dtype: str, part: str) -> None:
    model, cache = spoilt(f"model.layers.1.{part}.weight", dtype), packed_cache(kv_dtype, 2)
    with pytest.raises(NumericalFault, match="layer 1 are not finite"):
        model.forward(batch_of([([1, 2, 3], 0, [0])]), cache, np.array([2]))
    for array in cache.arrays:
        assert not array[1].any()


@kinds
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_spoilt_row_has_spoilt_logits(dtype: str, kv_dtype: str, name: str) -> None:
    """Never numbers that look like an answer: bytes have no NaN, so their scales must carry it."""
    model, cache = spoilt(name, dtype), packed_cache(kv_dtype, 1)
    logits = model.forward(batch_of([([1, 2, 3], 0, [0])]), cache, np.array([0, 2]))
    assert not np.isfinite(logits.max(axis=1)).any()


def test_scratch_suits_the_cache_it_is_used_with() -> None:
    model = packed("bfloat16")
    run: list[Run] = [(TEXT[:40], 0, [0, 1, 2])]
    first = in_pieces(model, packed_cache("bfloat16", 3), [run])
    other = in_pieces(model, packed_cache("float32", 3), [run])
    assert np.array_equal(first, in_pieces(model, packed_cache("bfloat16", 3), [run]))
    assert distance(first, other) < 0.05


def test_hidden_states_may_lie_anyhow() -> None:
    model = packed("bfloat16")
    hidden = np.random.default_rng(0).standard_normal((6, CONFIG.hidden_size)).astype(np.float32)
    assert np.array_equal(model.logits(hidden)[::2], model.logits(hidden[::2]))


@kinds
def test_copied_and_swapped_blocks_hold_what_the_originals_held(dtype: str, kv_dtype: str) -> None:
    model = packed(dtype)
    pieces: list[list[Run]] = [[(TEXT[:40], 0, [0, 1, 2])], [(TEXT[40:41], 40, [0, 1, 2])]]
    expected = in_pieces(model, packed_cache(kv_dtype, 10), pieces)
    cache = PackedKVCache(CONFIG, 10, 16, kv_dtype, num_tier_slots=4)
    model.forward(batch_of([(TEXT[:40], 0, [0, 1, 2])]), cache, np.array([39]))
    cache.copy_blocks([(0, 5)])
    cache.store([(1, 3), (2, 0)])
    cache.load([(3, 7), (0, 9)])
    actual = model.forward(batch_of([(TEXT[40:41], 40, [5, 7, 9])]), cache, np.array([0]))
    assert np.array_equal(expected, actual)


def test_no_rows_wanted_give_no_logits() -> None:
    actual = packed("float32").forward(batch_of([([1, 2], 0, [0])]), packed_cache("float32", 1), np.array([], np.int64))
    assert (0, CONFIG.vocab_size) == actual.shape
