"""The self-check of the row classes, as a program: do the tiles that `linear` finds hold for every number of rows?

`python -m tests.core.model.row_classes NUM_THREADS KxN ...` prints, as JSON, the kernels in use and for each shape the
tile found and the row counts (multiples of 16 up to 512) at which some row came out differently, with that tile and
with none. A program, because BLAS reads OPENBLAS_CORETYPE once, when it is loaded.
"""

import json
import sys

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_info, threadpool_limits

from core.model.linear import MAX_ROWS, ROW_MULTIPLE, find_row_tile, rows_agree

ROW_COUNTS = range(ROW_MULTIPLE, MAX_ROWS + 1, ROW_MULTIPLE)


def random_weight(num_in: int, num_out: int) -> NDArray[np.float32]:
    return np.random.default_rng(num_in * num_out).standard_normal((num_in, num_out), np.float32)


def broken_rows(weight_KN: NDArray[np.float32], row_tile: int | None) -> list[int]:
    """The row counts at which equal rows do not give equal bits."""
    return [num_rows for num_rows in ROW_COUNTS if not rows_agree(weight_KN, num_rows, row_tile)]


def main() -> None:
    num_threads, *shapes = sys.argv[1:]
    report = {}
    with threadpool_limits(int(num_threads), user_api="blas"):
        for shape in shapes:
            weight_KN = random_weight(*map(int, shape.split("x")))
            tile = find_row_tile(weight_KN)
            dense = [n for n in ROW_COUNTS[:8] if not rows_agree(weight_KN, n, None)]
            report[shape] = {"tile": tile, "broken": broken_rows(weight_KN, tile), "broken_without": dense}
        kernels = [(info["architecture"], info["num_threads"]) for info in threadpool_info()]
    sys.stdout.write(json.dumps({"kernels": kernels, "shapes": report}))


if __name__ == "__main__":
    main()
