"""Products whose rows do not depend on their neighbours.

BLAS picks its kernel by shape, and kernels add in different orders: a row may get other last bits alone than in a
batch, or at another place in it. With kernels for AVX-512 all rows agree once there are 16 of them; with those for
AVX2 (Haswell, Zen) the two halves of every 12 rows differ for ever. So each weight is tried once with equal rows
and gets the widest way of multiplying in which all of them come out with equal bits. Weights are kept (K, N) and
contiguous with N a multiple of 16, and the rows that come in a multiple of 16; both were measured to matter.
Why it matters: batch invariance, Thinking Machines 2025; DESIGN decision 6 holds the measurements.
"""

import numpy as np
from numpy.typing import NDArray

ROW_MULTIPLE = 16  # rows come in multiples of this
MAX_ROWS = 512  # beyond, a product is split
_PROBED_ROWS = (16, 48, 80, 128)
_TILES = (16, 8, 4, 1)

Floats = NDArray[np.float32]


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def pad_rows(x_TD: NDArray[np.generic]) -> NDArray[np.generic]:
    """The rows, and zeros below them up to a multiple of ROW_MULTIPLE."""
    missing = -len(x_TD) % ROW_MULTIPLE
    return np.pad(x_TD, [(0, missing)] + [(0, 0)] * (x_TD.ndim - 1)) if missing else x_TD


def multiply(x_TK: Floats, weight_KN: Floats, row_tile: int | None) -> Floats:
    """(T, N) = x @ weight, in one product (None) or `row_tile` rows at a time. T is a multiple of ROW_MULTIPLE."""
    num_rows, width = x_TK.shape
    if row_tile is not None:
        tiled = np.matmul(x_TK.reshape(num_rows // row_tile, row_tile, width), weight_KN)
        return np.asarray(tiled.reshape(num_rows, -1))
    if num_rows <= MAX_ROWS:
        return np.asarray(x_TK @ weight_KN)
    return np.concatenate([x_TK[i : i + MAX_ROWS] @ weight_KN for i in range(0, num_rows, MAX_ROWS)])


def rows_agree(weight_KN: Floats, num_rows: int, row_tile: int | None) -> bool:
    """True if equal rows give equal bits at all places, and the same as in the smallest product."""
    row_K = np.cos(np.arange(len(weight_KN), dtype=np.float32))  # any numbers that make rounding visible
    product_TN = multiply(np.tile(row_K, (num_rows, 1)), weight_KN, row_tile)
    smallest_TN = multiply(np.tile(row_K, (ROW_MULTIPLE, 1)), weight_KN, row_tile)
    return bool((product_TN == smallest_TN[0]).all())


def find_row_tile(weight_KN: Floats) -> int | None:
    """The widest way of multiplying by this weight in which rows do not depend on their neighbours."""
    if all(rows_agree(weight_KN, num_rows, None) for num_rows in _PROBED_ROWS):
        return None
    return next(tile for tile in _TILES if tile == 1 or rows_agree(weight_KN, ROW_MULTIPLE, tile))


class Linear:
    """y = x @ W without bias.

    Args:
        weight_NK: (out, in) float32, as files have it.
        row_tiles: remembers what was found for a shape, shared by the layers of a model.
    """

    def __init__(self, weight_NK: NDArray[np.floating], row_tiles: dict[tuple[int, int], int | None]) -> None:
        self.num_out = len(weight_NK)
        self._weight_KN = np.zeros((weight_NK.shape[1], round_up(self.num_out, 16)), np.float32)
        self._weight_KN[:, : self.num_out] = weight_NK.T
        shape = self._weight_KN.shape
        if shape not in row_tiles:
            row_tiles[shape] = find_row_tile(self._weight_KN)
        self._row_tile = row_tiles[shape]

    def __call__(self, x_TK: Floats) -> Floats:
        """(T, N padded to 16); columns from `num_out` on are zeros. T is a multiple of ROW_MULTIPLE."""
        return multiply(x_TK, self._weight_KN, self._row_tile)
