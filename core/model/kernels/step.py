"""One forward pass as one compiled call, the same for every thread: phases of units that they claim.

Embedding; then for each layer norm, products for queries, keys and values, rotation and storing, attention, output
product, norm, gate and up with SwiGLU, down product; then the last norm for the wanted rows. The output layer is a
call of its own. The residual stream is float32 whatever the weights are. One call keeps Python's
lock out of a whole pass.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from core.model.kernels.attention import attend, rotate_and_store
from core.model.kernels.claims import claim, complete, wait
from core.model.kernels.elementwise import address, element, normalise, pack
from core.model.kernels.lanes import swiglu
from core.model.kernels.packing import PANEL, Packed, Words
from core.model.kernels.products import (
    ROW_BLOCK,
    multiply,
    multiply_panel,
    num_row_blocks,
    panels_a_unit,
)
from core.model.kernels.simd import LANES, WORD_BYTES

PHASES_A_LAYER = 8
OTHER_PHASES = 2

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Weights(NamedTuple):
    """embedding (V, D) float32 or bfloat16 bits; norms (2 * L + 1, D); the products' right operands, layers first."""

    embedding: NDArray[np.float32] | NDArray[np.uint16]
    norms: Floats
    qkv: Packed
    output: Packed
    gate_up: Packed
    down: Packed
    head: Packed


class Sizes(NamedTuple):
    """What the loops need to know; cos and sin are (positions, head_dim / 2)."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    group: int
    num_ranks: int
    epsilon: np.float32
    cos: Floats
    sin: Floats


class Batch(NamedTuple):
    """token_ids, positions, slots (T,); tables (S, blocks); tiles (N, 4): span, first row, tokens, first position;
    wanted (R,): rows whose logits are asked for."""

    token_ids: Ints
    positions: Ints
    slots: Ints
    tables: Ints
    tiles: Ints
    wanted: Ints


class Scratch(NamedTuple):
    """Room for what lies between phases, (T, ...), and for each thread's own work, (ranks * rows, ...)."""

    stream: Floats
    normed: Words
    normed_scales: Floats
    qkv: Floats
    query: Words
    attended: Words
    attended_scales: Floats
    gate_up: Floats
    hidden: Words
    hidden_scales: Floats
    final: Floats
    fault: Ints
    row: Floats
    head: Floats
    activated: Floats
    queries: Words
    scores: Floats
    weights: Words
    output: Floats
    top: Floats
    total: Floats


@njit(nogil=True, error_model="numpy")
def _embed(sync, phase, weights, batch, scratch):
    table, num_rows = weights.embedding, batch.token_ids.shape[0]
    num_units = -(-num_rows // LANES)
    unit = claim(sync, phase)
    while unit < num_units:
        for row in range(unit * LANES, min(num_rows, (unit + 1) * LANES)):
            token = batch.token_ids[row]
            for i in range(table.shape[1]):
                scratch.stream[row, i] = element(table, token, i)
        complete(sync, phase)
        unit = claim(sync, phase)
    wait(sync, phase, num_units)


@njit(nogil=True, error_model="numpy")
def _normalise(sync, phase, rank, sizes, weights, norm, scratch, num_rows):
    width, normed, scales = scratch.stream.shape[1], scratch.normed, scratch.normed_scales
    num_units = -(-num_rows // LANES)
    unit = claim(sync, phase)
    while unit < num_units:
        for row in range(unit * LANES, min(num_rows, (unit + 1) * LANES)):
            normalise(scratch.row, rank, scratch.stream, row, weights.norms, norm, sizes.epsilon)
            pack(normed, address(normed, row), address(scales, row), 0, address(scratch.row, rank), width, sizes.group)
        complete(sync, phase)
        unit = claim(sync, phase)
    wait(sync, phase, num_units)


@njit(nogil=True, error_model="numpy")
def _gate_up(sync, phase, rank, sizes, weights, layer, scratch, num_rows):
    """Panels alternate: 32 columns of gate, the same 32 of up; `multiple` of these pairs make a group of `hidden`."""
    w, multiple = weights.gate_up, sizes.group // PANEL
    num_pairs = w.words.shape[1] // 2
    width = panels_a_unit(num_pairs, multiple)
    hidden, scales, own = scratch.hidden, scratch.hidden_scales, rank * ROW_BLOCK
    activated_at = address(scratch.activated, rank)
    blocks = num_row_blocks(num_rows)
    num_units = -(-num_pairs // width) * blocks
    unit = claim(sync, phase)
    while unit < num_units:
        row = unit % blocks * ROW_BLOCK
        rows = min(ROW_BLOCK, num_rows - row)
        first = unit // blocks * width
        for pair in range(first, min(num_pairs, first + width), multiple):
            for i in range(2 * multiple):
                multiply_panel(
                    w, layer, 2 * pair + i, scratch.normed, scratch.normed_scales, row, rows, sizes.group,
                    scratch.gate_up, own, i * PANEL, 0
                )  # fmt: skip
            for r in range(rows):
                at = address(scratch.gate_up, own + r)
                for i in range(multiple):
                    for j in range(0, PANEL, LANES):
                        gate = at + (i * 2 * PANEL + j) * WORD_BYTES
                        swiglu(activated_at + (i * PANEL + j) * WORD_BYTES, gate, gate + PANEL * WORD_BYTES)
                pack(hidden, address(hidden, row + r), address(scales, row + r), pair * PANEL,
                     activated_at, multiple * PANEL, sizes.group)  # fmt: skip
        complete(sync, phase)
        unit = claim(sync, phase)
    wait(sync, phase, num_units)


@njit(nogil=True, error_model="numpy")
def _finish(sync, phase, rank, sizes, weights, batch, scratch):
    """The last norm of the wanted rows."""
    num_units = batch.wanted.shape[0]
    unit = claim(sync, phase)
    while unit < num_units:
        normalise(
            scratch.final, unit, scratch.stream, batch.wanted[unit], weights.norms, 2 * sizes.num_layers, sizes.epsilon
        )
        complete(sync, phase)
        unit = claim(sync, phase)
    wait(sync, phase, num_units)


@njit(nogil=True, error_model="numpy", cache=True)
def hidden_states(rank, sync, sizes, weights, batch, cache, scratch):
    """What one thread does for one pass up to the last norm; `sync` is zero when the first one begins."""
    num_rows, group = batch.token_ids.shape[0], sizes.group
    _embed(sync, 0, weights, batch, scratch)
    phase = 1
    for layer in range(sizes.num_layers):
        _normalise(sync, phase, rank, sizes, weights, 2 * layer, scratch, num_rows)
        multiply(
            sync, phase + 1, weights.qkv, layer, scratch.normed, scratch.normed_scales, num_rows, group, scratch.qkv, 0
        )
        rotate_and_store(sync, phase + 2, rank, sizes, layer, batch, cache, scratch)
        attend(sync, phase + 3, rank, sizes, layer, batch, cache, scratch)
        multiply(
            sync,
            phase + 4,
            weights.output,
            layer,
            scratch.attended,
            scratch.attended_scales,
            num_rows,
            group,
            scratch.stream,
            1,
        )
        _normalise(sync, phase + 5, rank, sizes, weights, 2 * layer + 1, scratch, num_rows)
        _gate_up(sync, phase + 6, rank, sizes, weights, layer, scratch, num_rows)
        multiply(
            sync,
            phase + 7,
            weights.down,
            layer,
            scratch.hidden,
            scratch.hidden_scales,
            num_rows,
            group,
            scratch.stream,
            1,
        )
        phase += PHASES_A_LAYER
    _finish(sync, phase, rank, sizes, weights, batch, scratch)


@njit(nogil=True, error_model="numpy", cache=True)
def logits(rank, sync, weights, group, hidden, words, scales, out):
    """What one thread does for the output layer: out (R, V) from hidden states (R, D)."""
    num_rows = hidden.shape[0]
    unit = claim(sync, 0)
    while unit < num_rows:
        pack(words, address(words, unit), address(scales, unit), 0, address(hidden, unit), hidden.shape[1], group)
        complete(sync, 0)
        unit = claim(sync, 0)
    wait(sync, 0, num_rows)
    multiply(sync, 1, weights.head, 0, words, scales, num_rows, group, out, 0)
