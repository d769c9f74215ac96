"""Sixteen values at once, in LLVM's language: numba finds no way to put lanes together to bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gradsieve.kernels.blocks import BLOCK
from gradsieve.kernels.low_bit import STEPS

LANES = 16
_ROUNDER = 1.5 * 2**23
"""Added to a small float32 and taken away again, it leaves the nearest integer, ties to even."""

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


def _vector(kind: Any, *items: float) -> Any:
    return ir.Constant(kind, list(items) * (kind.count // len(items)))


def _everywhere(builder: Any, value: Any) -> Any:
    empty = ir.Constant(_FLOATS, ir.Undefined)
    alone = builder.insert_element(empty, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(alone, empty, _vector(_INTS, 0))


def _pointer(context: Any, builder: Any, target: Any, kind: Any, array: Any, place: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [place]), target.as_pointer())


def _packed(builder: Any, bits: int, codes: Any) -> Any:
    """Of a byte a code, all codes side by side in one integer."""
    per_byte = 8 // bits
    words = ir.VectorType(ir.IntType(8 * per_byte), LANES // per_byte)
    word, gap = builder.bitcast(codes, words), 8 - bits
    while gap < 4 * per_byte:
        word = builder.or_(word, builder.lshr(word, _vector(words, gap)))
        gap *= 2
    narrow = builder.trunc(word, ir.VectorType(ir.IntType(8), LANES // per_byte))
    return builder.bitcast(narrow, ir.IntType(LANES * bits))


def _magnitudes(builder: Any, value: Any) -> Any:
    without_sign = builder.and_(builder.bitcast(value, _INTS), _vector(_INTS, 0x7FFFFFFF))
    return builder.bitcast(without_sign, _FLOATS)


def _signs(builder: Any, value: Any) -> Any:
    return builder.fcmp_ordered(">=", value, _vector(_FLOATS, 0.0))


def _one_bit(builder: Any, value: Any, scale: Any) -> Any:
    return builder.bitcast(_signs(builder, value), ir.IntType(LANES))


def _two_bits(builder: Any, value: Any, scale: Any) -> Any:
    limit = builder.fmul(_vector(_FLOATS, 2.0), scale)
    beyond = builder.fcmp_ordered(">", _magnitudes(builder, value), limit)
    codes = ir.VectorType(ir.IntType(8), LANES)
    high = builder.select(beyond, _vector(codes, 2), _vector(codes, 0))
    return _packed(builder, 2, builder.or_(high, builder.zext(_signs(builder, value), codes)))


def _four_bits(builder: Any, value: Any, scale: Any) -> Any:
    steps = builder.fdiv(value, scale)
    for limit, order in ((float(STEPS), ">"), (-float(STEPS), "<")):
        far = builder.fcmp_ordered(order, steps, _vector(_FLOATS, limit))
        steps = builder.select(far, _vector(_FLOATS, limit), steps)
    rounder = _vector(_FLOATS, _ROUNDER)
    steps = builder.fsub(builder.fadd(steps, rounder), rounder)
    codes = builder.add(builder.fptosi(steps, _INTS), _vector(_INTS, 8))
    return _packed(builder, 4, builder.trunc(codes, ir.VectorType(ir.IntType(8), LANES)))


def _type_encode(formula: Callable[..., Any]) -> Callable[..., Any]:
    """From data[to] on, the codes of x[place : place + 16] side by side, the first one lowest."""

    def typed(_: Any, x: Any, place: Any, scale: Any, data: Any, to: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = _pointer(context, builder, _FLOATS, signature.args[0], *arguments[:2])
            codes = formula(builder, builder.load(pointer, align=4), _everywhere(builder, arguments[2]))
            target = _pointer(context, builder, codes.type, signature.args[3], *arguments[3:])
            builder.store(codes, target, align=1)
            return context.get_dummy_value()

        return types.void(x, place, scale, data, to), generate

    return typed


def _type_decode(bits: int, add: bool) -> Callable[..., Any]:
    """out[to : to + 16] = or += what the codes from data[place] on stand for."""

    def typed(_: Any, data: Any, place: Any, scale: Any, out: Any, to: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            packed = ir.IntType(LANES * bits)
            source = _pointer(context, builder, packed, signature.args[0], *arguments[:2])
            codes = builder.load(source, align=1)
            value = builder.fmul(_levels(builder, bits, codes), _everywhere(builder, arguments[2]))
            pointer = _pointer(context, builder, _FLOATS, signature.args[3], *arguments[3:])
            if add:
                value = builder.fadd(builder.load(pointer, align=4), value)
            builder.store(value, pointer, align=4)
            return context.get_dummy_value()

        return types.void(data, place, scale, out, to), generate

    return typed


def _type_rebase(_: Any, x: Any, begin: Any, lanes: Any) -> Any:
    """lanes[:16] = the sums of |x| of a full block, upper half added to lower half four times; whether any
    of its values is 0: the least of each lane is found along with the sums, from the same loads. Where some
    are NaN it may say that there is none, and nobody asks."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def rebase(place: int, stride: int) -> tuple[Any, Any]:
            """Every `stride`-th group of 16 values, from that at `place` on: their sums, and the least."""
            if stride == BLOCK:
                offset = builder.add(arguments[1], ir.Constant(arguments[1].type, place))
                pointer = _pointer(context, builder, _FLOATS, signature.args[0], arguments[0], offset)
                value = _magnitudes(builder, builder.load(pointer, align=4))
                return value, value
            (low, least), (high, other) = rebase(place, 2 * stride), rebase(place + stride, 2 * stride)
            less = builder.fcmp_ordered("<", least, other)
            return builder.fadd(low, high), builder.select(less, least, other)

        sums, least = rebase(0, LANES)
        first = ir.Constant(arguments[1].type, 0)
        target = _pointer(context, builder, _FLOATS, signature.args[2], arguments[2], first)
        builder.store(sums, target, align=4)
        zeros = builder.fcmp_ordered("==", least, _vector(_FLOATS, 0.0))
        some = builder.bitcast(zeros, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", some, ir.Constant(some.type, 0))

    return types.boolean(x, begin, lanes), generate


def _codes(builder: Any, bits: int, codes: Any) -> Any:
    """Of 16 codes side by side, each in a lane."""
    words = ir.VectorType(_INT, LANES * bits // 32)
    which = ir.Constant(_INTS, [lane * bits // 32 for lane in range(LANES)])
    word = builder.bitcast(codes, words)
    spread = builder.shuffle_vector(word, ir.Constant(words, ir.Undefined), which)
    shifts = ir.Constant(_INTS, [lane * bits % 32 for lane in range(LANES)])
    return builder.and_(builder.lshr(spread, shifts), _vector(_INTS, (1 << bits) - 1))


def _levels(builder: Any, bits: int, codes: Any) -> Any:
    """Of 16 codes side by side what they stand for, in units of the scale."""
    if bits == 1:
        marks = builder.bitcast(codes, ir.VectorType(ir.IntType(1), LANES))
        return builder.select(marks, _vector(_FLOATS, 1.0), _vector(_FLOATS, -1.0))
    code = _codes(builder, bits, codes)
    if bits == 4:
        return builder.sitofp(builder.sub(code, _vector(_INTS, 8)), _FLOATS)
    magnitude = builder.add(builder.and_(code, _vector(_INTS, 2)), _vector(_INTS, 1))
    negative = builder.sub(builder.and_(code, _vector(_INTS, 1)), _vector(_INTS, 1))  # all bits, or none
    return builder.sitofp(builder.sub(builder.xor(magnitude, negative), negative), _FLOATS)


def _sent(context: Any, builder: Any, kind: Any, array: Any, place: Any, parity: Any) -> Any:
    """Of 32 values those of one parity."""
    halves = []
    for ahead in (0, LANES):
        offset = builder.add(place, ir.Constant(place.type, ahead))
        halves.append(builder.load(_pointer(context, builder, _FLOATS, kind, array, offset), align=4))
    even, odd = (
        builder.shuffle_vector(*halves, ir.Constant(_INTS, [2 * lane + side for lane in range(LANES)]))
        for side in (0, 1)
    )
    return builder.select(builder.trunc(parity, ir.IntType(1)), odd, even)


def _type_count_sent(_: Any, x: Any, place: Any, parity: Any) -> Any:
    """How many of x[place : place + 32] of that parity are not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = _sent(context, builder, signature.args[0], *arguments)
        marks = builder.fcmp_unordered("!=", value, _vector(_FLOATS, 0.0))
        number = builder.ctpop(builder.bitcast(marks, ir.IntType(LANES)))
        return builder.zext(number, ir.IntType(64))

    return types.int64(x, place, parity), generate


def _type_encode_sent(bits: int) -> Callable[..., Any]:
    """From data[to] on, the codes of x[place : place + 32] in a block with zeros: those of one parity."""

    def typed(_: Any, x: Any, place: Any, parity: Any, scale: Any, data: Any, to: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = _sent(context, builder, signature.args[0], *arguments[:3])
            zero, kind = _vector(_FLOATS, 0.0), ir.VectorType(ir.IntType(8), LANES)
            marks = [
                (builder.fcmp_unordered("!=", value, zero), 1),
                (builder.fcmp_ordered(">", value, zero), 2),
            ]
            if bits == 2:
                limit = builder.fmul(_vector(_FLOATS, 2.0), _everywhere(builder, arguments[3]))
                marks.append((builder.fcmp_ordered(">", _magnitudes(builder, value), limit), 4))
            codes = _vector(kind, 0)
            for mark, bit in marks:
                codes = builder.or_(codes, builder.select(mark, _vector(kind, bit), _vector(kind, 0)))
            packed = _packed(builder, 2 * bits, codes)
            target = _pointer(context, builder, packed.type, signature.args[4], *arguments[4:])
            builder.store(packed, target, align=1)
            return context.get_dummy_value()

        return types.void(x, place, parity, scale, data, to), generate

    return typed


def _type_decode_sent(bits: int, add: bool) -> Callable[..., Any]:
    """The reverse: to out[to : to + 32], or on top of what is there."""

    def typed(_: Any, data: Any, place: Any, parity: Any, scale: Any, out: Any, to: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            whole = ir.IntType(2 * LANES * bits)
            source = _pointer(context, builder, whole, signature.args[0], *arguments[:2])
            code = _codes(builder, 2 * bits, builder.load(source, align=1))
            one, two = _vector(_INTS, 1), _vector(_INTS, 2)
            sign = builder.sub(builder.and_(code, two), one)
            level = builder.mul(builder.and_(code, one), sign)
            if bits == 2:
                larger = builder.and_(builder.lshr(code, one), two)
                level = builder.mul(level, builder.add(larger, one))
            scale = _everywhere(builder, arguments[3])
            sent = builder.fmul(builder.sitofp(level, _FLOATS), scale)
            others = builder.fmul(_vector(_FLOATS, 0.0), scale)
            is_odd = builder.trunc(arguments[2], ir.IntType(1))
            sides = builder.select(is_odd, others, sent), builder.select(is_odd, sent, others)
            for ahead in (0, LANES):
                lanes = [(ahead + lane) // 2 + LANES * (lane % 2) for lane in range(LANES)]
                value = builder.shuffle_vector(*sides, ir.Constant(_INTS, lanes))
                offset = builder.add(arguments[5], ir.Constant(arguments[5].type, ahead))
                target = _pointer(context, builder, _FLOATS, signature.args[4], arguments[4], offset)
                if add:
                    value = builder.fadd(builder.load(target, align=4), value)
                builder.store(value, target, align=4)
            return context.get_dummy_value()

        return types.void(data, place, parity, scale, out, to), generate

    return typed


encode_1: Any = intrinsic(_type_encode(_one_bit))
encode_2: Any = intrinsic(_type_encode(_two_bits))
encode_4: Any = intrinsic(_type_encode(_four_bits))
decode_1: Any = intrinsic(_type_decode(1, add=False))
decode_2: Any = intrinsic(_type_decode(2, add=False))
decode_4: Any = intrinsic(_type_decode(4, add=False))
add_1: Any = intrinsic(_type_decode(1, add=True))
add_2: Any = intrinsic(_type_decode(2, add=True))
add_4: Any = intrinsic(_type_decode(4, add=True))


rebase: Any = intrinsic(_type_rebase)
count_sent: Any = intrinsic(_type_count_sent)
encode_sent_1: Any = intrinsic(_type_encode_sent(1))
encode_sent_2: Any = intrinsic(_type_encode_sent(2))
decode_sent_1: Any = intrinsic(_type_decode_sent(1, add=False))
decode_sent_2: Any = intrinsic(_type_decode_sent(2, add=False))
add_sent_1: Any = intrinsic(_type_decode_sent(1, add=True))
add_sent_2: Any = intrinsic(_type_decode_sent(2, add=True))
