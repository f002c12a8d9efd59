"""x @ W over packed operands, shared between threads by blocks of rows and runs of panels."""

from numba import literally, njit, types
from numba.extending import overload

from core.model.kernels.claims import claim, complete, wait
from core.model.kernels.packing import PANEL
from core.model.kernels.simd import LANES, WORD_BYTES, tile, tile_int8

ROW_BLOCK = 96  # rows in a unit: a few tiles, so that a panel in the cache is used several times
_UNITS = 16  # units wanted in a phase: enough to share evenly, few enough that claiming costs nothing
_COLS = PANEL // LANES


def multiply_panel(w, layer, panel, x, x_scales, row, num_rows, group, out, out_row, out_col, is_adding):
    """out[out_row : out_row + num_rows, out_col : out_col + PANEL] (+)= x[row : row + num_rows] @ one panel of w."""
    raise NotImplementedError  # compiled code only: the dtype of the words chooses


def _float_tiles(is_adding):
    @njit(nogil=True, error_model="numpy")
    def tiles(w, layer, panel, x, x_scales, row, num_rows, group, out, out_row, out_col):
        words = w.words
        num_steps = words.shape[2]
        w_at = words.ctypes.data + (layer * words.shape[1] + panel) * num_steps * PANEL * WORD_BYTES
        x_stride, out_stride = x.shape[1], out.shape[1]
        start, end = row, row + num_rows
        while row < end:
            x_at = x.ctypes.data + row * x_stride * WORD_BYTES
            out_at = out.ctypes.data + ((row - start + out_row) * out_stride + out_col) * WORD_BYTES
            left = end - row
            if left >= 12:
                tile(words, 12, _COLS, is_adding, x_at, x_stride, w_at, PANEL, num_steps, out_at, out_stride)
                row += 12
            elif left >= 6:
                tile(words, 6, _COLS, is_adding, x_at, x_stride, w_at, PANEL, num_steps, out_at, out_stride)
                row += 6
            elif left >= 4:
                tile(words, 4, _COLS, is_adding, x_at, x_stride, w_at, PANEL, num_steps, out_at, out_stride)
                row += 4
            elif left >= 2:
                tile(words, 2, _COLS, is_adding, x_at, x_stride, w_at, PANEL, num_steps, out_at, out_stride)
                row += 2
            else:
                tile(words, 1, _COLS, is_adding, x_at, x_stride, w_at, PANEL, num_steps, out_at, out_stride)
                row += 1

    return tiles


def _int8_tiles(is_adding):
    @njit(nogil=True, error_model="numpy")
    def tiles(w, layer, panel, x, x_scales, row, num_rows, group, out, out_row, out_col):
        words = w.words
        at = layer * words.shape[1] + panel
        num_groups, steps = w.offsets.shape[2], group // 4
        w_at = words.ctypes.data + at * words.shape[2] * PANEL * WORD_BYTES
        offsets_at = w.offsets.ctypes.data + at * num_groups * PANEL * WORD_BYTES
        w_scales_at = w.scales.ctypes.data + at * PANEL * WORD_BYTES
        x_stride, s_stride, out_stride = x.shape[1], x_scales.shape[1], out.shape[1]
        start, end = row, row + num_rows
        while row < end:
            x_at = x.ctypes.data + row * x_stride * WORD_BYTES
            s_at = x_scales.ctypes.data + row * s_stride * WORD_BYTES
            out_at = out.ctypes.data + ((row - start + out_row) * out_stride + out_col) * WORD_BYTES
            left = end - row
            if left >= 6:
                tile_int8(6, _COLS, is_adding, x_at, x_stride, s_at, s_stride, w_at, PANEL, offsets_at, w_scales_at,
                          num_groups, steps, out_at, out_stride)  # fmt: skip
                row += 6
            elif left >= 4:
                tile_int8(4, _COLS, is_adding, x_at, x_stride, s_at, s_stride, w_at, PANEL, offsets_at, w_scales_at,
                          num_groups, steps, out_at, out_stride)  # fmt: skip
                row += 4
            elif left >= 2:
                tile_int8(2, _COLS, is_adding, x_at, x_stride, s_at, s_stride, w_at, PANEL, offsets_at, w_scales_at,
                          num_groups, steps, out_at, out_stride)  # fmt: skip
                row += 2
            else:
                tile_int8(1, _COLS, is_adding, x_at, x_stride, s_at, s_stride, w_at, PANEL, offsets_at, w_scales_at,
                          num_groups, steps, out_at, out_stride)  # fmt: skip
                row += 1

    return tiles


_TILES = {False: [_float_tiles(0), _float_tiles(1)], True: [_int8_tiles(0), _int8_tiles(1)]}


@overload(multiply_panel, jit_options={"nogil": True, "error_model": "numpy"}, prefer_literal=True)
def _multiply_panel(w, layer, panel, x, x_scales, row, num_rows, group, out, out_row, out_col, is_adding):
    tiles = _TILES[w.types[0].dtype == types.int32][is_adding.literal_value]
    return lambda w, layer, panel, x, x_scales, row, num_rows, group, out, out_row, out_col, is_adding: tiles(
        w, layer, panel, x, x_scales, row, num_rows, group, out, out_row, out_col
    )


@njit(nogil=True, error_model="numpy")
def num_row_blocks(num_rows):
    return -(-num_rows // ROW_BLOCK)


@njit(nogil=True, error_model="numpy")
def panels_a_unit(num_panels, multiple):
    """How many panels a unit has, so that there are about _UNITS of them."""
    return max(1, num_panels // (_UNITS * multiple)) * multiple


@njit(nogil=True, error_model="numpy")
def multiply(sync, phase, w, layer, x, x_scales, num_rows, group, out, is_adding):
    """A phase: out[:num_rows] (+)= x @ w[layer]."""
    literally(is_adding)
    num_panels = w.words.shape[1]
    width = panels_a_unit(num_panels, 1)
    blocks = num_row_blocks(num_rows)
    num_units = -(-num_panels // width) * blocks
    unit = claim(sync, phase)
    while unit < num_units:
        row = unit % blocks * ROW_BLOCK
        first = unit // blocks * width
        for panel in range(first, min(num_panels, first + width)):
            multiply_panel(
                w,
                layer,
                panel,
                x,
                x_scales,
                row,
                min(ROW_BLOCK, num_rows - row),
                group,
                out,
                row,
                panel * PANEL,
                is_adding,
            )
        complete(sync, phase)
        unit = claim(sync, phase)
    wait(sync, phase, num_units)
