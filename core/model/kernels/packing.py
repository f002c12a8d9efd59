"""Operands of products as the kernels want them: in 32-bit words, the right one cut into panels of columns.

`Packed` is a right operand W (K, N): panel p holds columns [PANEL * p, PANEL * (p + 1)), k by k, so that a tile reads
one contiguous run. bfloat16 rounds to nearest even. int8 has one scale a column, chosen so that the largest weight is
127; the left operand is quantised row by row in groups of `group_size` k, each with a scale of its own, and offset by
128 to be unsigned, which `offsets` takes back.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PANEL = 32
WORD_DTYPES = {"float32": np.float32, "bfloat16": np.uint32, "int8": np.int32}
VALUES_A_WORD = {"float32": 1, "bfloat16": 2, "int8": 4}
_ALIGNMENT = 64

Words = NDArray[np.float32] | NDArray[np.uint32] | NDArray[np.int32]


class Packed(NamedTuple):
    """words (..., P, K / values a word, PANEL); for int8 offsets (..., P, groups, PANEL) int32 and scales
    (..., P, PANEL) float32, else both empty."""

    words: Words
    offsets: NDArray[np.int32]
    scales: NDArray[np.float32]


def aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros that begin at a cache line, untouched (the pages come when they are written)."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def bfloat16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def group_size(*widths: int) -> int:
    """How many k share a scale: 64 where all widths allow it, else 32."""
    return 64 if all(width % 64 == 0 for width in widths) else 32


def allocate(dtype: str, lead: tuple[int, ...], num_in: int, num_out: int, group: int) -> Packed:
    """Room for right operands (num_in, num_out), columns rounded up to whole panels, `lead` of them."""
    panels = -(-num_out // PANEL)
    words = aligned((*lead, panels, num_in // VALUES_A_WORD[dtype], PANEL), WORD_DTYPES[dtype])
    is_int8 = dtype == "int8"
    offsets = np.zeros((*lead, panels, num_in // group if is_int8 else 0, PANEL), np.int32)
    return Packed(words, offsets, np.ones((*lead, panels, PANEL if is_int8 else 0), np.float32))


def pack_into(packed: Packed, dtype: str, weight_NK: NDArray[np.floating], group: int) -> None:
    """Write one weight, (out, in) as files have it. Columns past the last are zeros."""
    from core.model.kernels.panels import fill, fill_bfloat16

    values_NK = np.ascontiguousarray(weight_NK, np.float32)
    if dtype == "bfloat16":
        fill_bfloat16(packed.words, values_NK)
    elif dtype == "int8":
        fill(packed.words, _quantise(packed, values_NK, group).view(np.int32))
    else:
        fill(packed.words, values_NK)


def _quantise(packed: Packed, weight_NK: NDArray[np.float32], group: int) -> NDArray[np.int8]:
    """int8 weights; their scales and offsets go into `packed`."""
    scales_N = np.maximum(np.abs(weight_NK).max(axis=1), np.float32(1e-30)) / np.float32(127)
    with np.errstate(invalid="ignore"):  # a column with NaN or infinity has such a scale, which spoils all it gives
        quantised_NK = np.nan_to_num(np.rint(weight_NK / scales_N[:, None])).astype(np.int8)
    sums_NG = quantised_NK.reshape(len(weight_NK), -1, group).sum(axis=2, dtype=np.int32)
    for n in range(0, len(weight_NK), PANEL):
        panel = slice(n, n + PANEL)
        width = len(scales_N[panel])
        packed.scales[n // PANEL, :width] = scales_N[panel]
        packed.offsets[n // PANEL, :, :width] = -128 * sums_NG[panel].T
    return quantised_NK
