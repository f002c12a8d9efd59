"""What is done to 16 numbers at a time, for Numba: exp and what is made of it, rotation, rounding, quantising, copying.

Everything works on addresses; sums run in one fixed order.
"""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from core.model.kernels.simd import (
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LANES,
    LONG,
    WORD_BYTES,
    BFloat16,
    call,
    constant,
    floats,
    fma,
    load,
    pointer,
    splat,
    tree,
    vector_pointers,
)

_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_ROUNDER = 12582912.0  # 1.5 * 2**23: adding it leaves a small number's integer in the lowest bits


def _exp(b: Any, x: Any) -> Any:
    """e to the x, within 2 units in the last place; exactly 0 below -87, capped above 87. Cephes' expf."""
    is_visible = b.fcmp_ordered(">=", x, floats(-87.0))
    clipped = call(b, "llvm.minnum.v16f32", FLOATS, x, floats(87.0))
    clipped = b.select(is_visible, clipped, floats(-87.0))
    shifted = fma(b, clipped, floats(1.4426950408889634), floats(_ROUNDER))
    n = b.fsub(shifted, floats(_ROUNDER))
    r = fma(b, n, floats(2.12194440e-4), fma(b, n, floats(-0.693359375), clipped))
    p = floats(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        p = fma(b, p, r, floats(term))
    result = b.fadd(fma(b, b.fmul(p, r), r, r), floats(1.0))
    power = b.shl(b.add(b.bitcast(shifted, INTS), constant(127)), constant(23))
    return b.select(is_visible, b.fmul(result, b.bitcast(power, FLOATS)), floats(0.0))


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """e to the x, the same bits as in `soften`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(_exp(builder, splat(builder, args[0], FLOATS)), ir.Constant(INT, 0))

    return types.float32(types.float32), emit


@intrinsic(prefer_literal=True)
def soften(typing: Any, scores: Any, num: Any, top: Any) -> Any:
    """Turn `num` scores (a literal, LANES times a power of 2) into exp(score - new top), new top the largest yet.

    Returns new top and the sum of the weights, added in one fixed order.
    """
    num_vectors = num.literal_value // LANES
    result = types.containers.UniTuple(types.float32, 2)

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        pointers = vector_pointers(b, args[0], num_vectors)
        loaded = [load(b, at) for at in pointers]
        largest = tree(lambda x, y: call(b, "llvm.maxnum.v16f32", FLOATS, x, y), loaded)
        largest = call(b, "llvm.vector.reduce.fmax.v16f32", FLOAT, largest)
        new_top = call(b, "llvm.maxnum.f32", FLOAT, largest, args[2])
        new_tops = splat(b, new_top, FLOATS)
        weights = [_exp(b, b.fsub(x, new_tops)) for x in loaded]
        for target, weight in zip(pointers, weights, strict=True):
            b.store(weight, target).align = WORD_BYTES
        lanes = tree(b.fadd, weights)
        sums = [b.extract_element(lanes, ir.Constant(INT, lane)) for lane in range(LANES)]
        return context.make_tuple(b, result, [new_top, tree(b.fadd, sums)])

    return result(types.int64, num, types.float32), emit


@intrinsic
def swiglu(typing: Any, out: Any, gate: Any, up: Any) -> Any:
    """silu(gate) * up for the LANES float32 at each address."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, gate, up = [pointer(b, arg, FLOATS) for arg in args]
        gates = load(b, gate)
        sigmoid = b.fadd(_exp(b, b.fneg(gates)), floats(1.0))
        b.store(b.fmul(b.fdiv(gates, sigmoid), load(b, up)), out).align = WORD_BYTES
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


@intrinsic
def rotate(typing: Any, out: Any, x: Any, half_bytes: Any, cos: Any, sin: Any, scale: Any) -> Any:
    """Turn LANES elements of a head's first half with those of its second, `half_bytes` further on, times `scale`."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out, x, half_bytes, cos, sin, scale = args

        def vector(address: Any) -> Any:
            return load(b, pointer(b, address, FLOATS))

        first, second, scales = vector(x), vector(b.add(x, half_bytes)), splat(b, scale, FLOATS)
        c, s = vector(cos), vector(sin)
        turned = fma(b, first, c, b.fneg(b.fmul(second, s))), fma(b, second, c, b.fmul(first, s))
        for address, half in zip((out, b.add(out, half_bytes)), turned, strict=True):
            b.store(b.fmul(half, scales), pointer(b, address, FLOATS)).align = WORD_BYTES
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float32), emit


@intrinsic
def copy_lanes(typing: Any, target: Any, source: Any) -> Any:
    """Copy LANES float32 from one address to another."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = load(builder, pointer(builder, args[1], FLOATS))
        builder.store(loaded, pointer(builder, args[0], FLOATS)).align = WORD_BYTES
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def store_bfloat16(typing: Any, target: Any, source: Any) -> Any:
    """Round the LANES float32 at `source` to bfloat16, nearest even, and store them at `target`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = ir.VectorType(BFloat16(), LANES)
        rounded = builder.fptrunc(load(builder, pointer(builder, args[1], FLOATS)), bits)
        builder.store(rounded, pointer(builder, args[0], bits)).align = 2
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic(prefer_literal=True)
def store_int8(typing: Any, target: Any, scale: Any, source: Any, num: Any) -> Any:
    """Quantise `num` (a literal) float32 at `source` by their largest: bytes, 128 added, at `target`, and the scale."""
    num_vectors = num.literal_value // LANES

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        loaded = [load(b, at) for at in vector_pointers(b, args[2], num_vectors)]
        sizes = [call(b, "llvm.fabs.v16f32", FLOATS, x) for x in loaded]
        largest = tree(lambda x, y: call(b, "llvm.maxnum.v16f32", FLOATS, x, y), sizes)
        largest = call(b, "llvm.vector.reduce.fmax.v16f32", FLOAT, largest)
        largest = call(b, "llvm.maxnum.f32", FLOAT, largest, ir.Constant(FLOAT, 1e-30))
        # The maximum passes over NaN, and bytes have none: zero times all makes the scale NaN, and so the row's sums.
        spoilt = tree(b.fadd, [b.fmul(x, floats(0.0)) for x in loaded])
        spoilt = tree(b.fadd, [b.extract_element(spoilt, ir.Constant(INT, lane)) for lane in range(LANES)])
        scale = b.fadd(b.fdiv(largest, ir.Constant(FLOAT, 127.0)), spoilt)
        b.store(scale, pointer(b, args[1], FLOAT)).align = WORD_BYTES
        inverse = splat(b, b.fdiv(ir.Constant(FLOAT, 127.0), largest), FLOATS)
        octets = ir.VectorType(ir.IntType(8), LANES)
        start = pointer(b, args[0], octets)
        for i, x in enumerate(loaded):
            integers = b.bitcast(b.fadd(b.fmul(x, inverse), floats(_ROUNDER)), INTS)
            stored = b.store(b.trunc(b.add(integers, constant(128)), octets), b.gep(start, [ir.Constant(LONG, i)]))
            stored.align = 1
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, num), emit


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at an address, to be read soon."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = pointer(builder, args[0], ir.IntType(8))
        zero, kind = ir.Constant(INT, 0), ir.Constant(INT, 1)
        call(builder, "llvm.prefetch.p0", ir.VoidType(), line, zero, ir.Constant(INT, 3), kind)
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def float_from_bits(typing: Any, bits: Any) -> Any:
    """The float32 that has these 32 bits."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), emit


@intrinsic
def bits_from_float(typing: Any, number: Any) -> Any:
    """The 32 bits of a float32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], INT)

    return types.int32(types.float32), emit
