"""Attention over block tables, in the cache's own layout.

A block of keys is a panel already: for each word of a head's elements, 16 tokens side by side; so scores of a tile of
queries are one product a block, without sums across lanes. Values lie token by token (in bfloat16 two tokens a word), a
panel for the second product. A unit is a tile of queries and a key/value head; its context is taken in chunks of CHUNK
tokens counted from the first, softmax running over chunks as it goes (Milakov and Gimelshein 2018, arXiv:1805.02867).
Whatever a query must not see has weight zero exactly, so its result does not depend on who else is in the tile.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload

from core.model.kernels.claims import claim, complete, wait
from core.model.kernels.elementwise import address, bfloat16, is_finite, pack, rotate_head
from core.model.kernels.lanes import exp, prefetch, soften
from core.model.kernels.simd import LANES, WORD_BYTES, tile

CHUNK = 128  # context tokens between two looks at the running maximum
QUERY_TILE = 8  # query positions in a unit
_NO_SCALE = np.float32(1)


def put_value(slots, layer, block, head, offset, source, source_row, source_col):
    """Write one token's value into its slot. `slots` is the cache's view by single elements."""
    raise NotImplementedError  # compiled code only: the dtype of `slots` chooses


@njit(nogil=True, error_model="numpy")
def _put_float32(slots, layer, block, head, offset, source, source_row, source_col):
    for i in range(slots.shape[4]):
        slots[layer, block, head, offset, i] = source[source_row, source_col + i]


@njit(nogil=True, error_model="numpy")
def _put_bfloat16(slots, layer, block, head, offset, source, source_row, source_col):
    # By half words: the neighbour in the word may be another thread's.
    pair, side = offset // 2, offset % 2
    for i in range(slots.shape[4]):
        slots[layer, block, head, pair, i, side] = np.uint16(bfloat16(source[source_row, source_col + i]))


@overload(put_value, jit_options={"nogil": True, "error_model": "numpy"})
def _put_value(slots, layer, block, head, offset, source, source_row, source_col):
    chosen = {types.float32: _put_float32, types.uint16: _put_bfloat16}[slots.dtype]
    return lambda slots, layer, block, head, offset, source, source_row, source_col: chosen(
        slots, layer, block, head, offset, source, source_row, source_col
    )


def put_key(keys, layer, block, head, offset, source, source_row):
    """Write one token's key into its slot: a column of the block's panel."""
    raise NotImplementedError  # compiled code only: the dtype of `keys` chooses


@njit(nogil=True, error_model="numpy")
def _put_key_float32(keys, layer, block, head, offset, source, source_row):
    part, lane = offset // LANES, offset % LANES
    for i in range(keys.shape[4]):
        keys[layer, block, head, part, i, lane] = source[source_row, i]


@njit(nogil=True, error_model="numpy")
def _put_key_bfloat16(keys, layer, block, head, offset, source, source_row):
    part, lane = offset // LANES, offset % LANES
    for i in range(keys.shape[4]):
        low, high = bfloat16(source[source_row, 2 * i]), bfloat16(source[source_row, 2 * i + 1])
        keys[layer, block, head, part, i, lane] = low | (high << np.uint32(16))


@overload(put_key, jit_options={"nogil": True, "error_model": "numpy"})
def _put_key(keys, layer, block, head, offset, source, source_row):
    chosen = {types.float32: _put_key_float32, types.uint32: _put_key_bfloat16}[keys.dtype]
    return lambda keys, layer, block, head, offset, source, source_row: chosen(
        keys, layer, block, head, offset, source, source_row
    )


@njit(nogil=True, error_model="numpy")
def rotate_and_store(sync, phase, rank, sizes, layer, batch, cache, scratch):
    """A phase: queries rotated, scaled and packed; keys, rotated, and values into their slots.

    A row whose key or value is not finite is not stored, and scratch.fault says so: what once got into the pool would
    spoil whoever is given the block next.
    """
    qkv, head, query, head_dim = scratch.qkv, scratch.head, scratch.query, sizes.head_dim
    num_rows, half = batch.token_ids.shape[0], head_dim // 2
    k_start = sizes.num_heads * head_dim
    v_start = k_start + sizes.num_kv_heads * head_dim
    scale = np.float32(1) / np.sqrt(np.float32(head_dim))
    head_at = address(head, rank)
    num_units = -(-num_rows // LANES)
    unit = claim(sync, phase)
    while unit < num_units:
        for row in range(unit * LANES, min(num_rows, (unit + 1) * LANES)):
            angle = batch.positions[row] * half * WORD_BYTES
            cos, sin = sizes.cos.ctypes.data + angle, sizes.sin.ctypes.data + angle
            row_at, query_at = address(qkv, row), address(query, row)
            for i in range(sizes.num_heads):
                rotate_head(head_at, row_at + i * head_dim * WORD_BYTES, cos, sin, half, scale)
                pack(query, query_at, 0, i * head_dim, head_at, head_dim, head_dim)
            if not is_finite(qkv, row, k_start, 2 * sizes.num_kv_heads * head_dim):
                if scratch.fault[0] == 0:  # those after it follow from the first
                    scratch.fault[0] = layer + 1
                continue
            block, offset = batch.slots[row] // sizes.block_size, batch.slots[row] % sizes.block_size
            for i in range(sizes.num_kv_heads):
                rotate_head(head_at, row_at + (k_start + i * head_dim) * WORD_BYTES, cos, sin, half, _NO_SCALE)
                put_key(cache.keys, layer, block, i, offset, head, rank)
                put_value(cache.value_slots, layer, block, i, offset, qkv, row, v_start + i * head_dim)
        complete(sync, phase)
        unit = claim(sync, phase)
    wait(sync, phase, num_units)


@njit(nogil=True, error_model="numpy")
def _score(words, x_at, x_stride, num_rows, w_at, num_steps, out_at):
    """scores[:num_rows, 16 columns] = queries @ one panel of keys."""
    row = 0
    while row < num_rows:
        x, out, left = x_at + row * x_stride * WORD_BYTES, out_at + row * CHUNK * WORD_BYTES, num_rows - row
        if left >= 12:
            tile(words, 12, 1, 0, x, x_stride, w_at, LANES, num_steps, out, CHUNK)
            row += 12
        elif left >= 3:
            tile(words, 3, 1, 0, x, x_stride, w_at, LANES, num_steps, out, CHUNK)
            row += 3
        else:
            tile(words, 1, 1, 0, x, x_stride, w_at, LANES, num_steps, out, CHUNK)
            row += 1


@njit(nogil=True, error_model="numpy")
def _weigh(words, x_at, x_stride, num_rows, w_at, head_dim, num_steps, out_at):
    """output[:num_rows] += weights @ a part of one block's values, 64 or 32 columns at a time."""
    row = 0
    while row < num_rows:
        x, out, left = x_at + row * x_stride * WORD_BYTES, out_at + row * head_dim * WORD_BYTES, num_rows - row
        col, done = 0, 6 if left >= 6 else 3 if left >= 3 else 1
        while col < head_dim:
            w, o = w_at + col * WORD_BYTES, out + col * WORD_BYTES
            if head_dim - col >= 4 * LANES:
                if done == 6:
                    tile(words, 6, 4, 1, x, x_stride, w, head_dim, num_steps, o, head_dim)
                elif done == 3:
                    tile(words, 3, 4, 1, x, x_stride, w, head_dim, num_steps, o, head_dim)
                else:
                    tile(words, 1, 4, 1, x, x_stride, w, head_dim, num_steps, o, head_dim)
                col += 4 * LANES
            else:
                if done == 6:
                    tile(words, 6, 2, 1, x, x_stride, w, head_dim, num_steps, o, head_dim)
                elif done == 3:
                    tile(words, 3, 2, 1, x, x_stride, w, head_dim, num_steps, o, head_dim)
                else:
                    tile(words, 1, 2, 1, x, x_stride, w, head_dim, num_steps, o, head_dim)
                col += 2 * LANES
        row += done


@njit(nogil=True, error_model="numpy")
def _take_queries(base, num_rows, first_row, first_head, heads, scratch):
    """Queries of a tile, one after another; nothing seen yet."""
    queries, source, output = scratch.queries, scratch.query, scratch.output
    query_words, head_dim = queries.shape[1], output.shape[1]
    for i in range(num_rows):
        row, start = first_row + i // heads, (first_head + i % heads) * query_words
        for j in range(query_words):
            queries[base + i, j] = source[row, start + j]
        for j in range(head_dim):
            output[base + i, j] = 0
        scratch.top[base + i] = -np.inf
        scratch.total[base + i] = 0


@njit(nogil=True, error_model="numpy")
def _soften_rows(base, num_rows, heads, num_visible, scratch):
    """Scores of a tile to weights; what a row has summed so far shrinks by as much as its maximum grew.

    `num_visible` tokens of the chunk may be seen by the first position, one more by each that follows.
    """
    scores, output, weights = scratch.scores, scratch.output, scratch.weights
    tops, totals, head_dim = scratch.top, scratch.total, output.shape[1]
    for row in range(base, base + num_rows):
        for j in range(max(num_visible + (row - base) // heads, 0), CHUNK):
            scores[row, j] = -np.inf
        top = tops[row]
        score_at = address(scores, row)
        new_top, total = soften(score_at, CHUNK, top)
        if new_top != top:
            decay = exp(top - new_top)
            tops[row] = new_top
            totals[row] *= decay
            for j in range(head_dim):
                output[row, j] *= decay
        totals[row] += total
        pack(weights, address(weights, row), 0, 0, score_at, CHUNK, CHUNK)


@njit(nogil=True, error_model="numpy")
def _attend_tile(tile_index, group, rank, sizes, layer, batch, cache, scratch):
    """Output of one tile of queries for the query heads of one key/value head, packed for the output product."""
    span, first_row = batch.tiles[tile_index, 0], batch.tiles[tile_index, 1]
    num_tokens, position = batch.tiles[tile_index, 2], batch.tiles[tile_index, 3]
    keys, values, head_dim = cache.keys, cache.values, sizes.head_dim
    heads = sizes.num_heads // sizes.num_kv_heads
    num_rows = num_tokens * heads
    base = rank * (scratch.scores.shape[0] // sizes.num_ranks)
    query_words, weight_words = scratch.queries.shape[1], scratch.weights.shape[1]
    part_steps = LANES * weight_words // CHUNK
    q_at = scratch.queries.ctypes.data + base * query_words * WORD_BYTES
    score_at = scratch.scores.ctypes.data + base * CHUNK * WORD_BYTES
    weight_at = scratch.weights.ctypes.data + base * weight_words * WORD_BYTES
    out_at = scratch.output.ctypes.data + base * head_dim * WORD_BYTES
    _take_queries(base, num_rows, first_row, group * heads, heads, scratch)
    last = position + num_tokens - 1
    for start in range(0, last + 1, CHUNK):
        num_parts = min(CHUNK, last + LANES - start) // LANES
        for part in range(num_parts):
            token = start + part * LANES
            block = batch.tables[span, token // sizes.block_size]
            at = ((layer * keys.shape[1] + block) * keys.shape[2] + group) * keys.shape[3]
            at = (at + token % sizes.block_size // LANES) * query_words * LANES
            _score(keys, q_at, query_words, num_rows, keys.ctypes.data + at * WORD_BYTES, query_words,
                   score_at + part * LANES * WORD_BYTES)  # fmt: skip
            at = ((layer * keys.shape[1] + block) * keys.shape[2] + group) * values.shape[3]
            at = (at + token % sizes.block_size // LANES * part_steps) * head_dim  # the weights come next
            for line in range(0, part_steps * head_dim, LANES):
                prefetch(values.ctypes.data + (at + line) * WORD_BYTES)
        _soften_rows(base, num_rows, heads, position + 1 - start, scratch)
        for part in range(num_parts):
            token = start + part * LANES
            block = batch.tables[span, token // sizes.block_size]
            at = ((layer * keys.shape[1] + block) * keys.shape[2] + group) * values.shape[3]
            at = (at + token % sizes.block_size // LANES * part_steps) * head_dim
            _weigh(values, weight_at + part * part_steps * WORD_BYTES, weight_words, num_rows,
                   values.ctypes.data + at * WORD_BYTES, head_dim, part_steps, out_at)  # fmt: skip
    output, totals, attended, scales = scratch.output, scratch.total, scratch.attended, scratch.attended_scales
    for i in range(num_rows):
        inverse = np.float32(1) / totals[base + i]
        for j in range(head_dim):
            output[base + i, j] *= inverse
        column = (group * heads + i % heads) * head_dim
        row = first_row + i // heads
        pack(attended, address(attended, row), address(scales, row), column,
             address(output, base + i), head_dim, sizes.group)  # fmt: skip


@njit(nogil=True, error_model="numpy")
def attend(sync, phase, rank, sizes, layer, batch, cache, scratch):
    """A phase: attention of all tiles, those with the longest context first."""
    num_units = batch.tiles.shape[0] * sizes.num_kv_heads
    unit = claim(sync, phase)
    while unit < num_units:
        _attend_tile(unit // sizes.num_kv_heads, unit % sizes.num_kv_heads, rank, sizes, layer, batch, cache, scratch)
        complete(sync, phase)
        unit = claim(sync, phase)
    wait(sync, phase, num_units)
