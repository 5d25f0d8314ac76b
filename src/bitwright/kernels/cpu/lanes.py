"""Sixteen numbers as one value in Numba: vector types and the operations on them.

LLVM's loop vectoriser does not reliably take loops that compare, select and pack bits. These types map to LLVM's own
vectors, which every target lowers to the registers it has, so that a kernel written with them is vectorised by
construction and still reads as arithmetic: ``rint((x - origin) / step) + offset``.

All addresses are integers. Vectors need no alignment beyond that of their elements.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from bitwright.kernels.layout import LANES

from .compiling import has_feature

__all__ = [
    "LANES",
    "Lanes",
    "Scalar",
    "add_product",
    "as_bits",
    "as_float",
    "bf16_of",
    "even_lanes",
    "f16_of",
    "f16_of_float",
    "fetch_add",
    "float_from_bits",
    "float_of_f16",
    "float_to_bits",
    "from_mask",
    "give_way",
    "interleave_high",
    "interleave_low",
    "keep_first",
    "load_bf16",
    "load_f16",
    "load_f32",
    "load_i32",
    "load_mask",
    "load_u8",
    "mask_bits",
    "maximum",
    "minimum",
    "multiply_add",
    "odd_lanes",
    "peek_f32",
    "peek_f64",
    "peek_i16",
    "peek_i32",
    "peek_i64",
    "peek_shared",
    "peek_u8",
    "poke_f32",
    "poke_i16",
    "poke_i32",
    "poke_u8",
    "reduce_add",
    "reduce_max",
    "reduce_min",
    "rint",
    "round_to_bf16",
    "round_to_f16",
    "select",
    "splat",
    "splat_int",
    "stack_room",
    "store_bf16",
    "store_bf16_normal",
    "store_f16",
    "store_f32",
    "store_i32",
    "store_mask",
    "store_u8",
    "subtract_product",
    "to_float",
    "with_sign",
]


Emit = Callable[..., Any]

# In compiled functions: a vector of sixteen lanes, and a machine number whose width Numba infers.
Lanes: TypeAlias = Any
Scalar: TypeAlias = Any

_F64, _F32, _F16 = ir.DoubleType(), ir.FloatType(), ir.HalfType()
_BIT, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))


class _LaneType(types.Type):  # type: ignore[misc]  # numba has no annotations
    """A Numba type whose values are LLVM vectors."""

    def __init__(self, name: str, element: ir.Type) -> None:
        super().__init__(name=name)
        self.element = element
        self.vector = ir.VectorType(element, LANES)


class _LaneModel(models.PrimitiveModel):  # type: ignore[misc]  # numba has no annotations
    def __init__(self, manager: Any, fe_type: _LaneType) -> None:
        super().__init__(manager, fe_type, fe_type.vector)


register_model(_LaneType)(_LaneModel)

FLOATS = _LaneType("float32x16", _F32)
INTS = _LaneType("int32x16", _I32)
MASK = _LaneType("bool1x16", _BIT)


def _constant(lane_type: _LaneType, value: float) -> ir.Constant:
    return ir.Constant(lane_type.vector, [value] * LANES)


def _operation(result: Any, arguments: Sequence[Any], emit: Emit) -> Any:
    """An intrinsic of fixed types; ``emit(builder, *values)`` makes its code, and returns None for no result."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        made = emit(builder, *values)
        return context.get_dummy_value() if made is None else made

    def check(*given: Any) -> Any:
        fits = all(
            a == w if isinstance(w, _LaneType) else isinstance(a, types.Integer | types.Float)
            for a, w in zip(given, arguments, strict=True)
        )
        return (result(*arguments), code) if fits else None

    if len(arguments) == 1:
        return intrinsic(lambda typing, a: check(a))
    if len(arguments) == 2:
        return intrinsic(lambda typing, a, b: check(a, b))
    return intrinsic(lambda typing, a, b, c: check(a, b, c))


def _call(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _pointer(builder: Any, address: Any, pointee: ir.Type) -> Any:
    return builder.inttoptr(address, ir.PointerType(pointee))


def _spread(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _first_lanes(builder: Any, count: Any) -> Any:
    numbers = ir.Constant(ir.VectorType(_I64, LANES), list(range(LANES)))
    return builder.icmp_signed("<", numbers, _spread(builder, count))


_BYTES = {_I8: 1, _I16: 2, _I32: 4, _F32: 4}


def _load(builder: Any, address: Any, element: ir.Type) -> Any:
    pointer = _pointer(builder, address, ir.VectorType(element, LANES))
    return builder.load(pointer, align=_BYTES[element])


def _store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, _pointer(builder, address, value.type), align=_BYTES[value.type.element])


def _narrow_bf16(builder: Any, value: Any, bits: ir.Type) -> Any:
    """Round float32 to the upper half of its bits, ties to even; every NaN becomes 0x7FC0."""

    def number(n: int) -> ir.Constant:
        return ir.Constant(bits, [n] * LANES) if isinstance(bits, ir.VectorType) else ir.Constant(bits, n)

    raw = builder.bitcast(value, bits)
    odd = builder.and_(builder.lshr(raw, number(16)), number(1))
    rounded = builder.add(builder.add(raw, number(0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.lshr(builder.select(is_nan, number(0x7FC00000), rounded), number(16))


def _load_bf16(builder: Any, address: Any) -> Any:
    wide = builder.zext(_load(builder, address, _I16), INTS.vector)
    return builder.bitcast(builder.shl(wide, _constant(INTS, 16)), FLOATS.vector)


def _store_bf16(builder: Any, address: Any, value: Any) -> None:
    half = builder.trunc(_narrow_bf16(builder, value, INTS.vector), ir.VectorType(_I16, LANES))
    _store(builder, address, half)


class _BFloat16(ir.Type):  # type: ignore[misc]  # llvmlite has no annotations
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


def _store_bf16_normal(builder: Any, address: Any, value: Any) -> None:
    """Round float32, none of which is subnormal, to bfloat16.

    Processors convert with subnormals taken for zeros; a NaN stays one, whose bits depend on the processor.
    """
    if has_feature("avx512bf16"):
        half = builder.fptrunc(value, ir.VectorType(_BFloat16(), LANES))
        _store(builder, address, builder.bitcast(half, ir.VectorType(_I16, LANES)))
        return
    raw = builder.bitcast(value, INTS.vector)
    odd = builder.and_(builder.lshr(raw, _constant(INTS, 16)), _constant(INTS, 1))
    rounded = builder.lshr(builder.add(builder.add(raw, _constant(INTS, 0x7FFF)), odd), _constant(INTS, 16))
    _store(builder, address, builder.trunc(rounded, ir.VectorType(_I16, LANES)))


def _load_f16(builder: Any, address: Any) -> Any:
    half = builder.bitcast(_load(builder, address, _I16), ir.VectorType(_F16, LANES))
    return builder.fpext(half, FLOATS.vector)


def _store_f16(builder: Any, address: Any, value: Any) -> None:
    half = builder.fptrunc(value, ir.VectorType(_F16, LANES))
    _store(builder, address, builder.bitcast(half, ir.VectorType(_I16, LANES)))


def _with_sign(builder: Any, magnitude: Any, sign: Any) -> Any:
    return _call(builder, f"llvm.copysign.v{LANES}f32", FLOATS.vector, magnitude, sign)


def _give_way(builder: Any, _: Any) -> None:
    """Let other threads of the system run where it offers that; takes a number that it does not need."""
    if hasattr(os, "sched_yield"):
        _call(builder, "sched_yield", _I32)


_ADDRESS, _COUNT = types.int64, types.int64

load_f32 = _operation(FLOATS, (_ADDRESS,), lambda b, a: _load(b, a, _F32))
load_bf16 = _operation(FLOATS, (_ADDRESS,), _load_bf16)
load_f16 = _operation(FLOATS, (_ADDRESS,), _load_f16)
load_i32 = _operation(INTS, (_ADDRESS,), lambda b, a: _load(b, a, _I32))
store_f32 = _operation(types.void, (_ADDRESS, FLOATS), _store)
store_bf16 = _operation(types.void, (_ADDRESS, FLOATS), _store_bf16)
store_bf16_normal = _operation(types.void, (_ADDRESS, FLOATS), _store_bf16_normal)
store_f16 = _operation(types.void, (_ADDRESS, FLOATS), _store_f16)
store_i32 = _operation(types.void, (_ADDRESS, INTS), _store)

load_u8 = _operation(INTS, (_ADDRESS,), lambda b, a: b.zext(_load(b, a, _I8), INTS.vector))
store_u8 = _operation(types.void, (_ADDRESS, INTS), lambda b, a, v: _store(b, a, b.trunc(v, ir.VectorType(_I8, LANES))))

splat = _operation(FLOATS, (types.float32,), _spread)
splat_int = _operation(INTS, (types.int32,), _spread)
rint = _operation(FLOATS, (FLOATS,), lambda b, v: _call(b, f"llvm.rint.v{LANES}f32", FLOATS.vector, v))
with_sign = _operation(FLOATS, (FLOATS, FLOATS), _with_sign)
as_bits = _operation(INTS, (FLOATS,), lambda b, v: b.bitcast(v, INTS.vector))
as_float = _operation(FLOATS, (INTS,), lambda b, v: b.bitcast(v, FLOATS.vector))
to_float = _operation(FLOATS, (INTS,), lambda b, v: b.sitofp(v, FLOATS.vector))
from_mask = _operation(FLOATS, (MASK,), lambda b, v: b.uitofp(v, FLOATS.vector))
bf16_of = _operation(
    FLOATS,
    (FLOATS,),
    lambda b, v: b.bitcast(b.shl(_narrow_bf16(b, v, INTS.vector), _constant(INTS, 16)), FLOATS.vector),
)
f16_of = _operation(FLOATS, (FLOATS,), lambda b, v: b.fpext(b.fptrunc(v, ir.VectorType(_F16, LANES)), FLOATS.vector))
mask_bits = _operation(types.int32, (MASK,), lambda b, v: b.zext(b.bitcast(v, _I16), _I32))
select = _operation(FLOATS, (MASK, FLOATS, FLOATS), lambda b, m, v, w: b.select(m, v, w))
keep_first = _operation(INTS, (INTS, INTS, _COUNT), lambda b, v, w, n: b.select(_first_lanes(b, n), v, w))
maximum = _operation(INTS, (INTS, INTS), lambda b, v, w: b.select(b.icmp_signed(">", v, w), v, w))
minimum = _operation(INTS, (INTS, INTS), lambda b, v, w: b.select(b.icmp_signed("<", v, w), v, w))
reduce_max = _operation(types.int32, (INTS,), lambda b, v: _call(b, f"llvm.vector.reduce.smax.v{LANES}i32", _I32, v))
reduce_min = _operation(types.int32, (INTS,), lambda b, v: _call(b, f"llvm.vector.reduce.smin.v{LANES}i32", _I32, v))


def _sum(builder: Any, value: Any) -> Any:
    kind = ir.FunctionType(_F32, [_F32, value.type])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
    return builder.call(function, [_F32(0.0), value], fastmath=("reassoc",))


def _shuffled(order: Sequence[int]) -> Emit:
    return lambda b, v, w: b.shuffle_vector(v, w, ir.Constant(ir.VectorType(_I32, LANES), list(order)))


def _interleaved(start: int) -> Emit:
    return _shuffled([place for lane in range(start, start + LANES // 2) for place in (lane, lane + LANES)])


multiply_add = _operation(
    FLOATS, (FLOATS, FLOATS, FLOATS), lambda b, v, w, c: _call(b, f"llvm.fmuladd.v{LANES}f32", FLOATS.vector, v, w, c)
)
# One rounding each: ``v * w + c`` and ``c - v * w``.
add_product = _operation(
    FLOATS, (FLOATS, FLOATS, FLOATS), lambda b, v, w, c: _call(b, f"llvm.fma.v{LANES}f32", FLOATS.vector, v, w, c)
)
subtract_product = _operation(
    FLOATS,
    (FLOATS, FLOATS, FLOATS),
    lambda b, v, w, c: _call(b, f"llvm.fma.v{LANES}f32", FLOATS.vector, b.fneg(v), w, c),
)
reduce_add = _operation(types.float32, (FLOATS,), _sum)
interleave_low = _operation(FLOATS, (FLOATS, FLOATS), _interleaved(0))
interleave_high = _operation(FLOATS, (FLOATS, FLOATS), _interleaved(LANES // 2))
even_lanes = _operation(FLOATS, (FLOATS, FLOATS), _shuffled(range(0, 2 * LANES, 2)))
odd_lanes = _operation(FLOATS, (FLOATS, FLOATS), _shuffled(range(1, 2 * LANES, 2)))


def _store_mask(builder: Any, address: Any, mask: Any) -> None:
    builder.store(builder.bitcast(mask, _I16), _pointer(builder, address, _I16), align=1)


store_mask = _operation(types.void, (_ADDRESS, MASK), _store_mask)
load_mask = _operation(MASK, (_ADDRESS,), lambda b, a: b.bitcast(b.load(_pointer(b, a, _I16), align=1), MASK.vector))

peek_f32 = _operation(types.float32, (_ADDRESS,), lambda b, a: b.load(_pointer(b, a, _F32)))
peek_f64 = _operation(types.float64, (_ADDRESS,), lambda b, a: b.load(_pointer(b, a, _F64)))
peek_u8 = _operation(types.uint8, (_ADDRESS,), lambda b, a: b.load(_pointer(b, a, _I8)))
peek_i16 = _operation(types.int16, (_ADDRESS,), lambda b, a: b.load(_pointer(b, a, _I16)))
peek_i32 = _operation(types.int32, (_ADDRESS,), lambda b, a: b.load(_pointer(b, a, _I32)))
peek_i64 = _operation(types.int64, (_ADDRESS,), lambda b, a: b.load(_pointer(b, a, _I64)))


def _poke(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, _pointer(builder, address, value.type))


fetch_add = _operation(
    types.int64, (_ADDRESS,), lambda b, a: b.atomic_rmw("add", _pointer(b, a, _I64), _I64(1), "acq_rel")
)
peek_shared = _operation(types.int64, (_ADDRESS,), lambda b, a: b.load_atomic(_pointer(b, a, _I64), "acquire", 8))
give_way = _operation(types.void, (_COUNT,), _give_way)
poke_f32 = _operation(types.void, (_ADDRESS, types.float32), _poke)
poke_u8 = _operation(types.void, (_ADDRESS, types.uint8), _poke)
poke_i16 = _operation(types.void, (_ADDRESS, types.int16), _poke)
poke_i32 = _operation(types.void, (_ADDRESS, types.int32), _poke)
float_to_bits = _operation(types.int32, (types.float32,), lambda b, v: b.bitcast(v, _I32))
float_from_bits = _operation(types.float32, (types.int32,), lambda b, v: b.bitcast(v, _F32))
round_to_bf16 = _operation(
    types.float32,
    (types.float32,),
    lambda b, v: b.bitcast(b.shl(_narrow_bf16(b, v, _I32), _I32(16)), _F32),
)
round_to_f16 = _operation(types.float32, (types.float32,), lambda b, v: b.fpext(b.fptrunc(v, _F16), _F32))

f16_of_float = _operation(types.int16, (types.float32,), lambda b, v: b.bitcast(b.fptrunc(v, _F16), _I16))
float_of_f16 = _operation(types.float32, (types.int16,), lambda b, v: b.fpext(b.bitcast(v, _F16), _F32))


def stack_room(size: int) -> Any:
    """Make a compiled function without arguments that returns the address of ``size`` bytes on the caller's stack.

    Memory of an array does not do: Numba frees an array after its last use by name, and does not see that its address
    is still in use.
    """

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(_I8, size))
        room.align = 64
        return builder.ptrtoint(room, _I64)

    return intrinsic(lambda typing: (types.int64(), code))


def _operator(symbol: Any, lane_type: _LaneType, result: _LaneType, emit: Emit) -> None:
    operation = _operation(result, (lane_type, lane_type), emit)
    # Numba wants the two signatures equal, annotations included, which a lambda does not have.
    overload(symbol)(lambda a, b: (lambda a, b: operation(a, b)) if a == b == lane_type else None)


_operator(operator.add, FLOATS, FLOATS, lambda b, v, w: b.fadd(v, w))
_operator(operator.sub, FLOATS, FLOATS, lambda b, v, w: b.fsub(v, w))
_operator(operator.mul, FLOATS, FLOATS, lambda b, v, w: b.fmul(v, w))
_operator(operator.truediv, FLOATS, FLOATS, lambda b, v, w: b.fdiv(v, w))
_operator(operator.lt, FLOATS, MASK, lambda b, v, w: b.fcmp_ordered("<", v, w))
_operator(operator.le, FLOATS, MASK, lambda b, v, w: b.fcmp_ordered("<=", v, w))
_operator(operator.eq, FLOATS, MASK, lambda b, v, w: b.fcmp_ordered("==", v, w))
_operator(operator.and_, MASK, MASK, lambda b, v, w: b.and_(v, w))
_operator(operator.eq, INTS, MASK, lambda b, v, w: b.icmp_signed("==", v, w))
_operator(operator.lt, INTS, MASK, lambda b, v, w: b.icmp_signed("<", v, w))
_operator(operator.sub, INTS, INTS, lambda b, v, w: b.sub(v, w))
_operator(operator.or_, INTS, INTS, lambda b, v, w: b.or_(v, w))
_operator(operator.lshift, INTS, INTS, lambda b, v, w: b.shl(v, w))
_operator(operator.add, INTS, INTS, lambda b, v, w: b.add(v, w))
_operator(operator.and_, INTS, INTS, lambda b, v, w: b.and_(v, w))
_operator(operator.xor, INTS, INTS, lambda b, v, w: b.xor(v, w))
_operator(operator.rshift, INTS, INTS, lambda b, v, w: b.ashr(v, w))
