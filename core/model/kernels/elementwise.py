"""What is done to one row at a time: norm, rotation, SwiGLU, softmax, and writing rows as operands.

Rows are addressed by number in whole arrays, never sliced: a slice counts references, and two threads would fight over
the count. Sums run over a fixed number of terms, so that they add in one order.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload

from core.model.kernels.simd import LANES, WORD_BYTES, bits_from_float, float_from_bits, rotate, store_bfloat16

_REORDERED = {"reassoc", "contract", "arcp", "nsz"}  # sums in lanes: another order than written, always the same one
_MAGIC = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves a small number's integer in the lowest bits


@njit(nogil=True, error_model="numpy", inline="always")
def bfloat16(x):
    """Bits of a float32 rounded to bfloat16, nearest even, in the lower half of a uint32."""
    bits = np.uint32(bits_from_float(x))
    return np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


def pack(words, scales, row, col, source, source_row, source_col, num, group):
    """Write `num` float32 of a row as operand words of the row's columns from `col` on; all multiples of the group."""
    raise NotImplementedError  # compiled code only: the dtype of `words` chooses


@njit(nogil=True, error_model="numpy")
def _pack_float32(words, scales, row, col, source, source_row, source_col, num, group):
    for i in range(num):
        words[row, col + i] = source[source_row, source_col + i]


@njit(nogil=True, error_model="numpy")
def _pack_bfloat16(words, scales, row, col, source, source_row, source_col, num, group):
    to = words.ctypes.data + (row * words.shape[1] + col // 2) * WORD_BYTES
    at = source.ctypes.data + (source_row * source.shape[1] + source_col) * WORD_BYTES
    for i in range(0, num, LANES):  # two bfloat16 side by side are a word
        store_bfloat16(to + 2 * i, at + 4 * i)


@njit(nogil=True, error_model="numpy")
def _pack_int8(words, scales, row, col, source, source_row, source_col, num, group):
    for start in range(0, num, group):
        largest = np.float32(1e-30)
        for i in range(group):
            largest = max(largest, abs(source[source_row, source_col + start + i]))
        scales[row, (col + start) // group] = largest / np.float32(127)
        inverse = np.float32(127) / largest
        for i in range(group // 4):
            at = source_col + start + 4 * i
            word = np.int32(0)
            for j in range(4):
                rounded = bits_from_float(source[source_row, at + j] * inverse + _MAGIC) + np.int32(128)
                word |= (rounded & np.int32(255)) << np.int32(8 * j)
            words[row, (col + start) // 4 + i] = word


@overload(pack, jit_options={"nogil": True, "error_model": "numpy"})
def _pack(words, scales, row, col, source, source_row, source_col, num, group):
    chosen = {types.float32: _pack_float32, types.uint32: _pack_bfloat16, types.int32: _pack_int8}[words.dtype]
    return lambda words, scales, row, col, source, source_row, source_col, num, group: chosen(
        words, scales, row, col, source, source_row, source_col, num, group
    )


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
def rotate_head(out, out_row, x, row, start, cos, sin, position, scale):
    """Rotary embedding of the head that starts at `start`, halves convention, times `scale`."""
    half = cos.shape[1]
    out_at = out.ctypes.data + out_row * out.shape[1] * WORD_BYTES
    x_at = x.ctypes.data + (row * x.shape[1] + start) * WORD_BYTES
    angle = position * half * WORD_BYTES
    for i in range(0, half * WORD_BYTES, LANES * WORD_BYTES):
        rotate(out_at + i, x_at + i, half * WORD_BYTES, cos.ctypes.data + angle + i, sin.ctypes.data + angle + i, scale)


@njit(nogil=True, error_model="numpy")
def is_finite(x, row, start, num):
    """True if a stretch of a row has neither infinity nor NaN."""
    spoilt = np.float32(0)
    for i in range(num):
        spoilt += x[row, start + i] * np.float32(0)
    return spoilt == np.float32(0)


def element(table, row, col):
    """A float32 of a table of float32 or of bfloat16 bits."""
    raise NotImplementedError  # compiled code only: the dtype of `table` chooses


@overload(element, jit_options={"nogil": True, "error_model": "numpy"})
def _element(table, row, col):
    if table.dtype == types.uint16:
        return lambda table, row, col: float_from_bits(np.int32(table[row, col]) << np.int32(16))
    return lambda table, row, col: table[row, col]
