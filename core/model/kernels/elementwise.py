"""What is done to one row at a time: norms, rotation, and writing rows as operands.

Rows are addressed by number in whole arrays, never sliced: a slice counts references, and two threads would fight over
the count. Sums run over a fixed number of terms, so that they add in one order.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload

from core.model.kernels.lanes import bits_from_float, copy_lanes, float_from_bits, rotate, store_bfloat16, store_int8
from core.model.kernels.simd import LANES, WORD_BYTES

_LARGEST = np.float32(1e38)  # what is below it stays finite when it is turned and rounded
_REORDERED = {"reassoc", "contract", "arcp", "nsz"}  # sums in lanes: another order than written, always the same one


@njit(nogil=True, error_model="numpy", inline="always")
def bfloat16(x):
    """Bits of a float32 rounded to bfloat16, nearest even, in the lower half of a uint32."""
    bits = np.uint32(bits_from_float(x))
    return np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


def pack(like, row, scales, col, source, num, group):
    """Write `num` float32 at `source` as operand of a row's columns from `col` on; all multiples of the group.

    Row, its scales (int8 only) and source are addresses; `like`, any array of the operand's words, tells of which kind.
    """
    raise NotImplementedError  # compiled code only


@overload(pack, jit_options={"nogil": True, "error_model": "numpy"})
def _pack(like, row, scales, col, source, num, group):
    def float32_row(like, row, scales, col, source, num, group):
        for i in range(0, num, LANES):
            copy_lanes(row + 4 * (col + i), source + 4 * i)

    def bfloat16_row(like, row, scales, col, source, num, group):
        for i in range(0, num, LANES):  # two side by side are a word
            store_bfloat16(row + 2 * (col + i), source + 4 * i)

    def int8_row(like, row, scales, col, source, num, group):
        for i in range(0, num, group):
            scale = scales + 4 * ((col + i) // group)
            if group == 64:
                store_int8(row + col + i, scale, source + 4 * i, 64)
            else:
                store_int8(row + col + i, scale, source + 4 * i, 32)

    return {types.float32: float32_row, types.uint32: bfloat16_row, types.int32: int8_row}[like.dtype]


@njit(nogil=True, error_model="numpy", inline="always")
def address(array, row):
    """Of a row of 32-bit numbers."""
    return array.ctypes.data + row * array.shape[1] * WORD_BYTES


@njit(nogil=True, error_model="numpy", fastmath=_REORDERED)
def _mean_square(x, row):
    total = np.float32(0)
    for i in range(x.shape[1]):
        total += x[row, i] * x[row, i]
    return total / np.float32(x.shape[1])


@njit(nogil=True, error_model="numpy")
def normalise(out, out_row, x, row, weights, layer, epsilon):
    """Root-mean-square norm of one row."""
    inverse = np.float32(1) / np.sqrt(_mean_square(x, row) + epsilon)
    for i in range(x.shape[1]):
        out[out_row, i] = x[row, i] * inverse * weights[layer, i]


@njit(nogil=True, error_model="numpy")
def rotate_head(out, x, cos, sin, half, scale):
    """Rotary embedding of a head of 2 * half elements at x, halves convention, times `scale`; all are addresses."""
    for i in range(0, half * WORD_BYTES, LANES * WORD_BYTES):
        rotate(out + i, x + i, half * WORD_BYTES, cos + i, sin + i, scale)


@njit(nogil=True, error_model="numpy")
def is_finite(x, row, start, num):
    """True if a stretch of a row has no NaN, no infinity, and nothing that rotating or rounding would make one."""
    num_spoilt = 0
    for i in range(num):
        num_spoilt += 0 if abs(x[row, start + i]) < _LARGEST else 1
    return num_spoilt == 0


def element(table, row, col):
    """A float32 of a table of float32 or of bfloat16 bits."""
    raise NotImplementedError  # compiled code only: the dtype of `table` chooses


@overload(element, jit_options={"nogil": True, "error_model": "numpy"})
def _element(table, row, col):
    if table.dtype == types.uint16:
        return lambda table, row, col: float_from_bits(np.int32(table[row, col]) << np.int32(16))
    return lambda table, row, col: table[row, col]
