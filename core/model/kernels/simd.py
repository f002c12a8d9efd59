"""Vector instructions for Numba: the few that its own loops do not reach, as LLVM IR.

A product is computed in tiles of rows by 16-wide columns that stay in registers while k runs; every element adds its
terms in one fixed order, whatever the tile's height, so a row's bits do not depend on its neighbours. The right operand
lies in *panels*: for each step of k one contiguous run of columns. What a 32-bit word of an operand holds is told by
the array's dtype:

    float32   one float32, one k a step
    uint32    two bfloat16, two k a step; with AVX512_BF16 one instruction, elsewhere two shifts and two multiply-adds
    int32     four 8-bit integers, four k a step (left unsigned, right signed), summed in int32; AVX512_VNNI or plain

Vectors are 16 lanes wide; LLVM cuts them up for narrower machines. Register tiling: Goto and van de Geijn 2008,
doi:10.1145/1356052.1356053.
"""

from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
WORD_BYTES = 4

_FEATURES = binding.get_host_cpu_features()
HAS_BF16 = bool(_FEATURES.get("avx512bf16"))
HAS_VNNI = bool(_FEATURES.get("avx512vnni"))

FLOAT, INT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)


class BFloat16(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


_BFLOATS = ir.VectorType(BFloat16(), 2 * LANES)


def splat(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, None))


def constant(value: int) -> ir.Constant:
    return ir.Constant(INTS, [value] * LANES)


def call(builder: Any, name: str, result: ir.Type, *args: Any) -> Any:
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def fma(builder: Any, x: Any, w: Any, total: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", FLOATS, x, w, total)


def floats(value: float) -> ir.Constant:
    return ir.Constant(FLOATS, [value] * LANES)


def vector_pointers(b: Any, address: Any, num: int) -> list[Any]:
    start = pointer(b, address, FLOATS)
    return [b.gep(start, [ir.Constant(LONG, i)]) for i in range(num)]


def tree(combine: Any, values: list[Any]) -> Any:
    while len(values) > 1:
        values = [combine(*values[i : i + 2]) for i in range(0, len(values), 2)]
    return values[0]


def _step_float32(builder: Any, total: Any, x: Any, w: Any) -> Any:
    return fma(builder, x, w, total)


def _step_bfloat16(builder: Any, total: Any, x: Any, w: Any) -> Any:
    if HAS_BF16:
        pairs = [builder.bitcast(v, _BFLOATS) for v in (x, w)]
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, *pairs)
    low = [builder.bitcast(builder.shl(v, constant(16)), FLOATS) for v in (x, w)]
    high = [builder.bitcast(builder.and_(v, constant(0xFFFF0000)), FLOATS) for v in (x, w)]
    return fma(builder, high[0], high[1], fma(builder, low[0], low[1], total))


def _step_int8(builder: Any, total: Any, x: Any, w: Any) -> Any:
    if HAS_VNNI:
        return call(
            builder,
            "llvm.x86.avx512.vpdpbusd.512",
            INTS,
            total,
            *(builder.bitcast(v, _BYTES) for v in (x, w)),
        )
    for shift in (0, 8, 16, 24):
        unsigned = builder.and_(builder.lshr(x, constant(shift)), constant(0xFF))
        signed = builder.ashr(builder.shl(w, constant(24 - shift)), constant(24))
        total = builder.add(total, builder.mul(unsigned, signed))
    return total


# By dtype of the right operand: type of a word, of a vector of them, of the sums, and one step of k.
_KINDS = {
    types.float32: (FLOAT, FLOATS, FLOATS, _step_float32),
    types.uint32: (INT, INTS, FLOATS, _step_bfloat16),
    types.int32: (INT, INTS, INTS, _step_int8),
}


def pointer(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def load(builder: Any, pointer: Any) -> Any:
    loaded = builder.load(pointer)
    loaded.align = WORD_BYTES
    return loaded


class _Tile:
    """Emits the loop over k of one tile. Addresses are integers; strides are in words."""

    def __init__(self, builder: Any, dtype: Any, rows: int, cols: int) -> None:
        self.builder = builder
        self.rows, self.cols = rows, cols
        self.word, self.words, self.sums, self.step = _KINDS[dtype]

    def starts(self, address: Any, row_stride: Any, vector: ir.VectorType) -> list[Any]:
        """A pointer to the first vector of each row."""
        b = self.builder
        stride = b.mul(row_stride, ir.Constant(LONG, WORD_BYTES))
        return [pointer(b, b.add(address, b.mul(stride, ir.Constant(LONG, row))), vector) for row in range(self.rows)]

    def loop(self, x: Any, x_stride: Any, w: Any, w_step: Any, num_steps: Any, totals: list[list[Any]]) -> list[Any]:
        """totals[r][c] + sum over k of x[r, k] * w[k, c], as a list of rows."""
        b = self.builder
        x_rows = self.starts(x, x_stride, self.word)
        before, body = b.block, b.append_basic_block("k")
        after = b.append_basic_block("k.end")
        b.branch(body)
        b.position_at_end(body)
        k, w_at = b.phi(LONG), b.phi(LONG)
        k.add_incoming(ir.Constant(LONG, 0), before)
        w_at.add_incoming(w, before)
        phis = [[b.phi(self.sums) for _ in row] for row in totals]
        w_vectors = [
            load(b, pointer(b, b.add(w_at, ir.Constant(LONG, col * LANES * WORD_BYTES)), self.words))
            for col in range(self.cols)
        ]
        results = []
        for row, phi_row in zip(x_rows, phis, strict=True):
            x_vector = splat(b, load(b, b.gep(row, [k])), self.words)
            results.append([self.step(b, phi, x_vector, w) for phi, w in zip(phi_row, w_vectors, strict=True)])
        next_k = b.add(k, ir.Constant(LONG, 1))
        k.add_incoming(next_k, body)
        w_at.add_incoming(b.add(w_at, b.mul(w_step, ir.Constant(LONG, WORD_BYTES))), body)
        for phi_row, total_row, result_row in zip(phis, totals, results, strict=True):
            for phi, total, result in zip(phi_row, total_row, result_row, strict=True):
                phi.add_incoming(total, before)
                phi.add_incoming(result, body)
        b.cbranch(b.icmp_signed("<", next_k, num_steps), body, after)
        b.position_at_end(after)
        return results

    def each(self, address: Any, stride: Any, vector: ir.VectorType) -> list[list[Any]]:
        """Pointers to the vectors of a tile of a matrix."""
        rows = self.starts(address, stride, vector)
        return [[self.builder.gep(row, [ir.Constant(LONG, col)]) for col in range(self.cols)] for row in rows]

    def store(self, results: list[Any], address: Any, stride: Any) -> None:
        for pointers, row in zip(self.each(address, stride, results[0][0].type), results, strict=True):
            for target, result in zip(pointers, row, strict=True):
                self.builder.store(result, target).align = WORD_BYTES

    def loads(self, address: Any, stride: Any, vector: ir.VectorType) -> list[list[Any]]:
        return [[load(self.builder, p) for p in row] for row in self.each(address, stride, vector)]


@intrinsic(prefer_literal=True)
def tile(
    typing: Any,
    like: Any,
    rows: Any,
    cols: Any,
    add: Any,
    x: Any,
    x_stride: Any,
    w: Any,
    w_step: Any,
    num_steps: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """out[r, c] (+)= sum over k of x[r, k] * w[k, c], for float32 and bfloat16.

    Args:
        like: any array of the operands' dtype.
        rows, cols, add: literals: height, width in vectors, and 1 to add to what is there.
        x, w, out: addresses; w_step: from one k to the next; num_steps: at least 1.
    """
    num_rows, num_cols, is_adding = rows.literal_value, cols.literal_value, add.literal_value
    dtype = like.dtype

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, x_stride, w, w_step, num_steps, out, out_stride = args[4:]
        emitter = _Tile(builder, dtype, num_rows, num_cols)
        totals: list[list[Any]] = [[ir.Constant(emitter.sums, None)] * num_cols for _ in range(num_rows)]
        if is_adding:
            totals = emitter.loads(out, out_stride, emitter.sums)
        emitter.store(emitter.loop(x, x_stride, w, w_step, num_steps, totals), out, out_stride)
        return context.get_dummy_value()

    return types.void(like, rows, cols, add, *[types.int64] * 7), emit


@intrinsic(prefer_literal=True)
def tile_int8(
    typing: Any,
    rows: Any,
    cols: Any,
    add: Any,
    x: Any,
    x_stride: Any,
    x_scales: Any,
    x_scales_stride: Any,
    w: Any,
    w_step: Any,
    offsets: Any,
    w_scales: Any,
    num_groups: Any,
    group_steps: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """out[r, c] (+)= w_scale[c] * sum over groups g of x_scale[r, g] * (offset[g, c] + sum over k of x[r, k] w[k, c]).

    Integers are exact within a group of k; groups are added in float32. `offsets` (groups, columns) int32 takes away
    what the left operand's being unsigned has added; its rows and w's have the same stride, `w_step`.
    """
    num_rows, num_cols, is_adding = rows.literal_value, cols.literal_value, add.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, x_stride, x_scales, scales_stride, w, w_step, offsets, w_scales, num_groups, steps, out, out_stride = args[
            3:
        ]
        b = builder
        emitter = _Tile(b, types.int32, num_rows, num_cols)
        scale_rows = emitter.starts(x_scales, scales_stride, FLOAT)
        before, body = b.block, b.append_basic_block("group")
        after = b.append_basic_block("group.end")
        b.branch(body)
        b.position_at_end(body)
        group = b.phi(LONG)
        group.add_incoming(ir.Constant(LONG, 0), before)
        totals = [[b.phi(FLOATS) for _ in range(num_cols)] for _ in range(num_rows)]
        step_bytes = b.mul(w_step, ir.Constant(LONG, WORD_BYTES))
        start = b.mul(group, steps)
        offset_row = b.add(offsets, b.mul(group, step_bytes))
        zero_offsets = [
            load(b, pointer(b, b.add(offset_row, ir.Constant(LONG, col * LANES * WORD_BYTES)), INTS))
            for col in range(num_cols)
        ]
        integers = emitter.loop(
            b.add(x, b.mul(start, ir.Constant(LONG, WORD_BYTES))),
            x_stride,
            b.add(w, b.mul(start, step_bytes)),
            w_step,
            steps,
            [zero_offsets] * num_rows,
        )
        results = []
        for total_row, integer_row, scale_row in zip(totals, integers, scale_rows, strict=True):
            scale = splat(b, load(b, b.gep(scale_row, [group])), FLOATS)
            results.append([fma(b, b.sitofp(i, FLOATS), scale, t) for i, t in zip(integer_row, total_row, strict=True)])
        next_group = b.add(group, ir.Constant(LONG, 1))
        group.add_incoming(next_group, b.block)
        for total_row, result_row in zip(totals, results, strict=True):
            for total, result in zip(total_row, result_row, strict=True):
                total.add_incoming(ir.Constant(FLOATS, None), before)
                total.add_incoming(result, b.block)
        b.cbranch(b.icmp_signed("<", next_group, num_groups), body, after)
        b.position_at_end(after)
        w_scale_row = [
            load(b, pointer(b, b.add(w_scales, ir.Constant(LONG, col * LANES * WORD_BYTES)), FLOATS))
            for col in range(num_cols)
        ]
        scaled = [[b.fmul(r, s) for r, s in zip(row, w_scale_row, strict=True)] for row in results]
        if is_adding:
            there = emitter.loads(out, out_stride, FLOATS)
            scaled = [[b.fadd(t, s) for t, s in zip(*rows, strict=True)] for rows in zip(there, scaled, strict=True)]
        emitter.store(scaled, out, out_stride)
        return context.get_dummy_value()

    return types.void(rows, cols, add, *[types.int64] * 12), emit


@intrinsic
def fetch_add(typing: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at an address as one indivisible act; returns what was there."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], LONG), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """The int64 at an address, and with it all that was written before it."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(pointer(builder, args[0], LONG), "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the core that this loop only waits."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if binding.get_default_triple().startswith(("x86", "i686")):
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def cycle_counter(typing: Any) -> Any:
    """A clock that costs nothing to read; what it counts is the machine's affair."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return call(builder, "llvm.readcyclecounter", LONG)

    return types.int64(), emit
