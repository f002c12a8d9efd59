"""Linear: a row's bits are its own, whatever stands beside it, on every family of kernels that we can reach."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from core.model import linear
from core.model.config import ModelConfig
from core.model.linear import Linear, find_row_tile, multiply, pad_rows, round_up, rows_agree
from core.model.tiny import DRAFT_DIR, TARGET_DIR
from core.model.weights import load_model_config
from tests.core.model.row_classes import ROW_COUNTS, broken_rows, random_weight

Floats = NDArray[np.float32]
ROOT = Path(__file__).resolve().parents[3]


def product_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(in, out) of a layer's products, with those that share an input put together, and of the head if it is small."""
    queries = config.num_heads * config.head_dim
    qkv = queries + 2 * config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = [(hidden, round_up(config.vocab_size, 16))] if config.vocab_size < 1000 else []
    return [(hidden, qkv), (queries, hidden), (hidden, 2 * inner), (inner, hidden), *heads]


TINY_SHAPES = sorted({s for path in (TARGET_DIR, DRAFT_DIR) for s in product_shapes(load_model_config(path))})
SMOLLM2_SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads on cores shared with others wait for each other; where threads matter, a test asks for them."""
    with threadpool_limits(1, user_api="blas"):
        yield


@pytest.mark.parametrize("shape", TINY_SHAPES + SMOLLM2_SHAPES, ids=str)
def test_equal_rows_give_equal_bits_at_every_place_of_every_batch(shape: tuple[int, int]) -> None:
    """For each multiple of 16 up to 512 rows, more than are tried when a weight is loaded."""
    weight_KN = random_weight(*shape)
    assert [] == broken_rows(weight_KN, find_row_tile(weight_KN))


def test_head_over_a_large_vocabulary_keeps_its_rows() -> None:
    weight_KN = random_weight(576, 49152)
    tile = find_row_tile(weight_KN)
    assert [] == [num_rows for num_rows in (32, 192) if not rows_agree(weight_KN, num_rows, tile)]


@pytest.mark.parametrize("kernels", ["Haswell", "of this machine"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_keep_their_bits_with_other_kernels_and_threads(kernels: str, num_threads: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    if kernels == "Haswell":
        environment["OPENBLAS_CORETYPE"] = "Haswell"
    shapes = [f"{k}x{n}" for k, n in (TINY_SHAPES if num_threads == 1 else TINY_SHAPES[:3])]
    command = [sys.executable, "-m", "tests.core.model.row_classes", str(num_threads), *shapes]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=240)

    report = json.loads(done.stdout)
    assert {shape: [] for shape in shapes} == {shape: r["broken"] for shape, r in report["shapes"].items()}
    # Where one product without tiles would have done, it is taken: tiles cost time.
    assert all(r["broken_without"] for r in report["shapes"].values() if r["tile"] is not None)


def _place_dependent(x_TK: Floats, weight_KN: Floats, row_tile: int | None) -> Floats:
    """A product whose row 13 of every dense batch is added up in another order; as kernels for AVX2 do."""
    product_TN = multiply(x_TK, weight_KN, 1)
    if row_tile is None:
        half = len(weight_KN) // 2
        product_TN[13] = x_TK[13, :half] @ weight_KN[:half] + x_TK[13, half:] @ weight_KN[half:]
    return product_TN


def _size_dependent(x_TK: Floats, weight_KN: Floats, row_tile: int | None) -> Floats:
    """A product whose rows agree among themselves, but are added up in another order from 48 rows on."""
    if row_tile is not None or len(x_TK) < 48:
        return multiply(x_TK, weight_KN, 1)
    half = len(weight_KN) // 2
    return multiply(x_TK[:, :half], weight_KN[:half], 1) + multiply(x_TK[:, half:], weight_KN[half:], 1)


@pytest.mark.parametrize("broken", [_place_dependent, _size_dependent])
def test_product_that_depends_on_place_or_size_is_rejected(
    broken: Callable[[Floats, Floats, int | None], Floats], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_KN = random_weight(192, 192)
    monkeypatch.setattr(linear, "multiply", broken)

    assert not rows_agree(weight_KN, 48, None)
    assert find_row_tile(weight_KN) is not None
    assert [] != broken_rows(weight_KN, None)


def test_weight_that_agrees_in_no_tile_is_multiplied_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x_TK: Floats, weight_KN: Floats, row_tile: int | None) -> Floats:
        return _place_dependent(x_TK, weight_KN, None)

    monkeypatch.setattr(linear, "multiply", broken)
    assert 1 == find_row_tile(random_weight(192, 192))


@pytest.mark.parametrize("row_tile", [None, 16, 8, 4, 1])
@pytest.mark.parametrize("num_rows", [16, 512, 528])
def test_every_way_of_multiplying_gives_the_product(row_tile: int | None, num_rows: int) -> None:
    weight_KN = random_weight(48, 32)
    x_TK = random_weight(num_rows, 48)
    expected = x_TK.astype(np.float64) @ weight_KN
    np.testing.assert_allclose(expected, multiply(x_TK, weight_KN, row_tile), atol=1e-4)


def test_rows_beyond_the_longest_product_have_the_same_bits() -> None:
    layer = Linear(random_weight(192, 64), {})
    x_TK = random_weight(1040, 64)
    whole_TN = layer(x_TK)
    for start in (0, 496, 512, 1024):
        assert np.array_equal(layer(x_TK[start : start + 16]), whole_TN[start : start + 16])


def test_linear_is_the_transposed_product_with_zeros_behind() -> None:
    weight_NK = random_weight(37, 24)
    layer = Linear(weight_NK, {})
    x_TK = random_weight(16, 24)
    y_TN = layer(x_TK)

    assert (16, 48) == y_TN.shape
    assert 37 == layer.num_out
    np.testing.assert_allclose(x_TK.astype(np.float64) @ weight_NK.T, y_TN[:, :37], atol=1e-5)
    assert not y_TN[:, 37:].any()


def test_shape_is_probed_once_and_shared() -> None:
    row_tiles: dict[tuple[int, int], int | None] = {(24, 48): 4}
    Linear(random_weight(40, 24), row_tiles)
    assert {(24, 48): 4} == row_tiles
    Linear(random_weight(40, 32), row_tiles)
    assert {(24, 48), (32, 48)} == set(row_tiles)


@pytest.mark.parametrize(("num_rows", "padded"), [(1, 16), (15, 16), (16, 16), (17, 32), (0, 0)])
def test_rows_are_padded_with_zeros(num_rows: int, padded: int) -> None:
    for shape in [(num_rows,), (num_rows, 3)]:
        rows = pad_rows(np.ones(shape))
        assert (padded, *shape[1:]) == rows.shape
        assert np.prod(shape) == rows.sum()


def test_every_number_of_rows_up_to_the_longest_product_is_checked() -> None:
    assert (16, 512, 32) == (ROW_COUNTS[0], ROW_COUNTS[-1], len(ROW_COUNTS))
