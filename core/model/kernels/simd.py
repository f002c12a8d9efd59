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

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)


class _BFloat16(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_BFLOATS = ir.VectorType(_BFloat16(), 2 * LANES)


def _splat(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, None))


def _constant(value: int) -> ir.Constant:
    return ir.Constant(_INTS, [value] * LANES)


def _call(builder: Any, name: str, result: ir.Type, *args: Any) -> Any:
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def _fma(builder: Any, x: Any, w: Any, total: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", _FLOATS, x, w, total)


def _step_float32(builder: Any, total: Any, x: Any, w: Any) -> Any:
    return _fma(builder, x, w, total)


def _step_bfloat16(builder: Any, total: Any, x: Any, w: Any) -> Any:
    if HAS_BF16:
        pairs = [builder.bitcast(v, _BFLOATS) for v in (x, w)]
        return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, total, *pairs)
    low = [builder.bitcast(builder.shl(v, _constant(16)), _FLOATS) for v in (x, w)]
    high = [builder.bitcast(builder.and_(v, _constant(0xFFFF0000)), _FLOATS) for v in (x, w)]
    return _fma(builder, high[0], high[1], _fma(builder, low[0], low[1], total))


def _step_int8(builder: Any, total: Any, x: Any, w: Any) -> Any:
    if HAS_VNNI:
        return _call(
            builder,
            "llvm.x86.avx512.vpdpbusd.512",
            _INTS,
            total,
            *(builder.bitcast(v, _BYTES) for v in (x, w)),
        )
    for shift in (0, 8, 16, 24):
        unsigned = builder.and_(builder.lshr(x, _constant(shift)), _constant(0xFF))
        signed = builder.ashr(builder.shl(w, _constant(24 - shift)), _constant(24))
        total = builder.add(total, builder.mul(unsigned, signed))
    return total


# By dtype of the right operand: type of a word, of a vector of them, of the sums, and one step of k.
_KINDS = {
    types.float32: (_FLOAT, _FLOATS, _FLOATS, _step_float32),
    types.uint32: (_INT, _INTS, _FLOATS, _step_bfloat16),
    types.int32: (_INT, _INTS, _INTS, _step_int8),
}


def _pointer(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, pointer: Any) -> Any:
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
        stride = b.mul(row_stride, ir.Constant(_LONG, WORD_BYTES))
        return [_pointer(b, b.add(address, b.mul(stride, ir.Constant(_LONG, row))), vector) for row in range(self.rows)]

    def loop(self, x: Any, x_stride: Any, w: Any, w_step: Any, num_steps: Any, totals: list[list[Any]]) -> list[Any]:
        """totals[r][c] + sum over k of x[r, k] * w[k, c], as a list of rows."""
        b = self.builder
        x_rows = self.starts(x, x_stride, self.word)
        before, body = b.block, b.append_basic_block("k")
        after = b.append_basic_block("k.end")
        b.branch(body)
        b.position_at_end(body)
        k, w_at = b.phi(_LONG), b.phi(_LONG)
        k.add_incoming(ir.Constant(_LONG, 0), before)
        w_at.add_incoming(w, before)
        phis = [[b.phi(self.sums) for _ in row] for row in totals]
        w_vectors = [
            _load(b, _pointer(b, b.add(w_at, ir.Constant(_LONG, col * LANES * WORD_BYTES)), self.words))
            for col in range(self.cols)
        ]
        results = []
        for row, phi_row in zip(x_rows, phis, strict=True):
            x_vector = _splat(b, _load(b, b.gep(row, [k])), self.words)
            results.append([self.step(b, phi, x_vector, w) for phi, w in zip(phi_row, w_vectors, strict=True)])
        next_k = b.add(k, ir.Constant(_LONG, 1))
        k.add_incoming(next_k, body)
        w_at.add_incoming(b.add(w_at, b.mul(w_step, ir.Constant(_LONG, WORD_BYTES))), body)
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
        return [[self.builder.gep(row, [ir.Constant(_LONG, col)]) for col in range(self.cols)] for row in rows]

    def store(self, results: list[Any], address: Any, stride: Any) -> None:
        for pointers, row in zip(self.each(address, stride, results[0][0].type), results, strict=True):
            for pointer, result in zip(pointers, row, strict=True):
                self.builder.store(result, pointer).align = WORD_BYTES

    def loads(self, address: Any, stride: Any, vector: ir.VectorType) -> list[list[Any]]:
        return [[_load(self.builder, p) for p in row] for row in self.each(address, stride, vector)]


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
        scale_rows = emitter.starts(x_scales, scales_stride, _FLOAT)
        before, body = b.block, b.append_basic_block("group")
        after = b.append_basic_block("group.end")
        b.branch(body)
        b.position_at_end(body)
        group = b.phi(_LONG)
        group.add_incoming(ir.Constant(_LONG, 0), before)
        totals = [[b.phi(_FLOATS) for _ in range(num_cols)] for _ in range(num_rows)]
        step_bytes = b.mul(w_step, ir.Constant(_LONG, WORD_BYTES))
        start = b.mul(group, steps)
        offset_row = b.add(offsets, b.mul(group, step_bytes))
        zero_offsets = [
            _load(b, _pointer(b, b.add(offset_row, ir.Constant(_LONG, col * LANES * WORD_BYTES)), _INTS))
            for col in range(num_cols)
        ]
        integers = emitter.loop(
            b.add(x, b.mul(start, ir.Constant(_LONG, WORD_BYTES))),
            x_stride,
            b.add(w, b.mul(start, step_bytes)),
            w_step,
            steps,
            [zero_offsets] * num_rows,
        )
        results = []
        for total_row, integer_row, scale_row in zip(totals, integers, scale_rows, strict=True):
            scale = _splat(b, _load(b, b.gep(scale_row, [group])), _FLOATS)
            results.append(
                [_fma(b, b.sitofp(i, _FLOATS), scale, t) for i, t in zip(integer_row, total_row, strict=True)]
            )
        next_group = b.add(group, ir.Constant(_LONG, 1))
        group.add_incoming(next_group, b.block)
        for total_row, result_row in zip(totals, results, strict=True):
            for total, result in zip(total_row, result_row, strict=True):
                total.add_incoming(ir.Constant(_FLOATS, None), before)
                total.add_incoming(result, b.block)
        b.cbranch(b.icmp_signed("<", next_group, num_groups), body, after)
        b.position_at_end(after)
        w_scale_row = [
            _load(b, _pointer(b, b.add(w_scales, ir.Constant(_LONG, col * LANES * WORD_BYTES)), _FLOATS))
            for col in range(num_cols)
        ]
        scaled = [[b.fmul(r, s) for r, s in zip(row, w_scale_row, strict=True)] for row in results]
        if is_adding:
            there = emitter.loads(out, out_stride, _FLOATS)
            scaled = [[b.fadd(t, s) for t, s in zip(*rows, strict=True)] for rows in zip(there, scaled, strict=True)]
        emitter.store(scaled, out, out_stride)
        return context.get_dummy_value()

    return types.void(rows, cols, add, *[types.int64] * 12), emit


@intrinsic
def float_from_bits(typing: Any, bits: Any) -> Any:
    """The float32 that has these 32 bits."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), emit


@intrinsic
def bits_from_float(typing: Any, number: Any) -> Any:
    """The 32 bits of a float32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _INT)

    return types.int32(types.float32), emit


_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_ROUNDER = 12582912.0  # 1.5 * 2**23: adding it leaves a small number's integer in the lowest bits


def _floats(value: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [value] * LANES)


def _exp(b: Any, x: Any) -> Any:
    """e to the x, within 2 units in the last place; exactly 0 below -87, capped above 87. Cephes' expf."""
    is_visible = b.fcmp_ordered(">=", x, _floats(-87.0))
    clipped = _call(b, "llvm.minnum.v16f32", _FLOATS, x, _floats(87.0))
    clipped = b.select(is_visible, clipped, _floats(-87.0))
    shifted = _fma(b, clipped, _floats(1.4426950408889634), _floats(_ROUNDER))
    n = b.fsub(shifted, _floats(_ROUNDER))
    r = _fma(b, n, _floats(2.12194440e-4), _fma(b, n, _floats(-0.693359375), clipped))
    p = _floats(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        p = _fma(b, p, r, _floats(term))
    result = b.fadd(_fma(b, b.fmul(p, r), r, r), _floats(1.0))
    power = b.shl(b.add(b.bitcast(shifted, _INTS), _constant(127)), _constant(23))
    return b.select(is_visible, b.fmul(result, b.bitcast(power, _FLOATS)), _floats(0.0))


def _vector_pointers(b: Any, address: Any, num: int) -> list[Any]:
    start = _pointer(b, address, _FLOATS)
    return [b.gep(start, [ir.Constant(_LONG, i)]) for i in range(num)]


def _tree(combine: Any, values: list[Any]) -> Any:
    while len(values) > 1:
        values = [combine(*values[i : i + 2]) for i in range(0, len(values), 2)]
    return values[0]


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """e to the x, the same bits as in `soften`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(_exp(builder, _splat(builder, args[0], _FLOATS)), ir.Constant(_INT, 0))

    return types.float32(types.float32), emit


@intrinsic(prefer_literal=True)
def soften(typing: Any, scores: Any, num: Any, top: Any) -> Any:
    """Turn `num` scores (a literal, LANES times a power of 2) into exp(score - new top), new top the largest yet.

    Returns new top and the sum of the weights, added in one fixed order.
    """
    num_vectors = num.literal_value // LANES
    result = types.containers.UniTuple(types.float32, 2)

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        pointers = _vector_pointers(b, args[0], num_vectors)
        loaded = [_load(b, pointer) for pointer in pointers]
        largest = _tree(lambda x, y: _call(b, "llvm.maxnum.v16f32", _FLOATS, x, y), loaded)
        largest = _call(b, "llvm.vector.reduce.fmax.v16f32", _FLOAT, largest)
        new_top = _call(b, "llvm.maxnum.f32", _FLOAT, largest, args[2])
        new_tops = _splat(b, new_top, _FLOATS)
        weights = [_exp(b, b.fsub(x, new_tops)) for x in loaded]
        for pointer, weight in zip(pointers, weights, strict=True):
            b.store(weight, pointer).align = WORD_BYTES
        lanes = _tree(b.fadd, weights)
        sums = [b.extract_element(lanes, ir.Constant(_INT, lane)) for lane in range(LANES)]
        return context.make_tuple(b, result, [new_top, _tree(b.fadd, sums)])

    return result(types.int64, num, types.float32), emit


@intrinsic
def swiglu(typing: Any, out: Any, gate: Any, up: Any) -> Any:
    """silu(gate) * up for the LANES float32 at each address."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, gate, up = [_pointer(b, arg, _FLOATS) for arg in args]
        gates = _load(b, gate)
        sigmoid = b.fadd(_exp(b, b.fneg(gates)), _floats(1.0))
        b.store(b.fmul(b.fdiv(gates, sigmoid), _load(b, up)), out).align = WORD_BYTES
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


@intrinsic
def rotate(typing: Any, out: Any, x: Any, half_bytes: Any, cos: Any, sin: Any, scale: Any) -> Any:
    """Turn LANES elements of a head's first half with those of its second, `half_bytes` further on, times `scale`."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, x, half_bytes, cos, sin, scale = args

        def vector(address: Any) -> Any:
            return _load(b, _pointer(b, address, _FLOATS))

        first, second, scales = vector(x), vector(b.add(x, half_bytes)), _splat(b, scale, _FLOATS)
        c, s = vector(cos), vector(sin)
        turned = _fma(b, first, c, b.fneg(b.fmul(second, s))), _fma(b, second, c, b.fmul(first, s))
        for address, half in zip((out, b.add(out, half_bytes)), turned, strict=True):
            b.store(b.fmul(half, scales), _pointer(b, address, _FLOATS)).align = WORD_BYTES
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float32), emit


@intrinsic
def copy_lanes(typing: Any, target: Any, source: Any) -> Any:
    """Copy LANES float32 from one address to another."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = _load(builder, _pointer(builder, args[1], _FLOATS))
        builder.store(loaded, _pointer(builder, args[0], _FLOATS)).align = WORD_BYTES
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def store_bfloat16(typing: Any, target: Any, source: Any) -> Any:
    """Round the LANES float32 at `source` to bfloat16, nearest even, and store them at `target`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = ir.VectorType(_BFloat16(), LANES)
        rounded = builder.fptrunc(_load(builder, _pointer(builder, args[1], _FLOATS)), bits)
        builder.store(rounded, _pointer(builder, args[0], bits)).align = 2
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic(prefer_literal=True)
def store_int8(typing: Any, target: Any, scale: Any, source: Any, num: Any) -> Any:
    """Quantise `num` (a literal) float32 at `source` by their largest: bytes, 128 added, at `target`, and the scale."""
    num_vectors = num.literal_value // LANES

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        loaded = [_load(b, pointer) for pointer in _vector_pointers(b, args[2], num_vectors)]
        sizes = [_call(b, "llvm.fabs.v16f32", _FLOATS, x) for x in loaded]
        largest = _tree(lambda x, y: _call(b, "llvm.maxnum.v16f32", _FLOATS, x, y), sizes)
        largest = _call(b, "llvm.vector.reduce.fmax.v16f32", _FLOAT, largest)
        largest = _call(b, "llvm.maxnum.f32", _FLOAT, largest, ir.Constant(_FLOAT, 1e-30))
        # The maximum passes over NaN, and bytes have none: zero times all makes the scale NaN, and so the row's sums.
        spoilt = _tree(b.fadd, [b.fmul(x, _floats(0.0)) for x in loaded])
        spoilt = _tree(b.fadd, [b.extract_element(spoilt, ir.Constant(_INT, lane)) for lane in range(LANES)])
        scale = b.fadd(b.fdiv(largest, ir.Constant(_FLOAT, 127.0)), spoilt)
        b.store(scale, _pointer(b, args[1], _FLOAT)).align = WORD_BYTES
        inverse = _splat(b, b.fdiv(ir.Constant(_FLOAT, 127.0), largest), _FLOATS)
        octets = ir.VectorType(ir.IntType(8), LANES)
        start = _pointer(b, args[0], octets)
        for i, x in enumerate(loaded):
            integers = b.bitcast(b.fadd(b.fmul(x, inverse), _floats(_ROUNDER)), _INTS)
            stored = b.store(b.trunc(b.add(integers, _constant(128)), octets), b.gep(start, [ir.Constant(_LONG, i)]))
            stored.align = 1
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, num), emit


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at an address, to be read soon."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], ir.IntType(8))
        zero, kind = ir.Constant(_INT, 0), ir.Constant(_INT, 1)
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, zero, ir.Constant(_INT, 3), kind)
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def fetch_add(typing: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at an address as one indivisible act; returns what was there."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], _LONG), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """The int64 at an address, and with it all that was written before it."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0], _LONG), "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the core that this loop only waits."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if binding.get_default_triple().startswith(("x86", "i686")):
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def cycle_counter(typing: Any) -> Any:
    """A clock that costs nothing to read; what it counts is the machine's affair."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "llvm.readcyclecounter", _LONG)

    return types.int64(), emit
