"""Values in four bits, two or one, compiled for this CPU by numba: the bytes of `low_bit.py` at less cost.

For contiguous float32 on the CPU, under the same rules as `compiled.py`. Elements are coded 16 at once, in
LLVM's language: numba finds no way to put lanes together to bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import float32, int32, int64, njit, types, uint8, uint32, uint64
from numba.extending import intrinsic, register_jitable
from torch import Tensor

from gradsieve.kernels.low_bit import BLOCK, NOT_A_NUMBER, SHARE, STEPS, size_of
from gradsieve.kernels.pointers import INFINITE, bits_of, bytes_at, float_of, floats_at

_LANES = 16
_GROUPS = BLOCK // _LANES
_ROUNDER = 1.5 * 2**23
"""Added to a small float32 and taken away again, it leaves the nearest integer, ties to even."""

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_INT, _LANES)


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
    words = ir.VectorType(ir.IntType(8 * per_byte), _LANES // per_byte)
    word, gap = builder.bitcast(codes, words), 8 - bits
    while gap < 4 * per_byte:
        word = builder.or_(word, builder.lshr(word, _vector(words, gap)))
        gap *= 2
    narrow = builder.trunc(word, ir.VectorType(ir.IntType(8), _LANES // per_byte))
    return builder.bitcast(narrow, ir.IntType(_LANES * bits))


def _signs(builder: Any, value: Any) -> Any:
    return builder.fcmp_ordered(">=", value, _vector(_FLOATS, 0.0))


def _one_bit(builder: Any, value: Any, scale: Any) -> Any:
    return builder.bitcast(_signs(builder, value), ir.IntType(_LANES))


def _two_bits(builder: Any, value: Any, scale: Any) -> Any:
    limit = builder.fmul(_vector(_FLOATS, 2.0), scale)
    magnitude = builder.and_(builder.bitcast(value, _INTS), _vector(_INTS, 0x7FFFFFFF))
    beyond = builder.fcmp_ordered(">", builder.bitcast(magnitude, _FLOATS), limit)
    codes = ir.VectorType(ir.IntType(8), _LANES)
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
    return _packed(builder, 4, builder.trunc(codes, ir.VectorType(ir.IntType(8), _LANES)))


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
            packed = ir.IntType(_LANES * bits)
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


def _levels(builder: Any, bits: int, codes: Any) -> Any:
    """Of 16 codes side by side what they stand for, in units of the scale."""
    if bits == 1:
        marks = builder.bitcast(codes, ir.VectorType(ir.IntType(1), _LANES))
        return builder.select(marks, _vector(_FLOATS, 1.0), _vector(_FLOATS, -1.0))
    words = ir.VectorType(_INT, _LANES * bits // 32)
    which = ir.Constant(_INTS, [lane * bits // 32 for lane in range(_LANES)])
    word = builder.bitcast(codes, words)
    spread = builder.shuffle_vector(word, ir.Constant(words, ir.Undefined), which)
    shifts = ir.Constant(_INTS, [lane * bits % 32 for lane in range(_LANES)])
    code = builder.and_(builder.lshr(spread, shifts), _vector(_INTS, (1 << bits) - 1))
    if bits == 4:
        return builder.sitofp(builder.sub(code, _vector(_INTS, 8)), _FLOATS)
    magnitude = builder.add(builder.and_(code, _vector(_INTS, 2)), _vector(_INTS, 1))
    negative = builder.sub(builder.and_(code, _vector(_INTS, 1)), _vector(_INTS, 1))  # all bits, or none
    return builder.sitofp(builder.sub(builder.xor(magnitude, negative), negative), _FLOATS)


_encode_1: Any = intrinsic(_type_encode(_one_bit))
_encode_2: Any = intrinsic(_type_encode(_two_bits))
_encode_4: Any = intrinsic(_type_encode(_four_bits))
_decode_1: Any = intrinsic(_type_decode(1, add=False))
_decode_2: Any = intrinsic(_type_decode(2, add=False))
_decode_4: Any = intrinsic(_type_decode(4, add=False))
_add_1: Any = intrinsic(_type_decode(1, add=True))
_add_2: Any = intrinsic(_type_decode(2, add=True))
_add_4: Any = intrinsic(_type_decode(4, add=True))


@register_jitable
def _two(x: Any, i: Any) -> Any:
    return abs(x[i]) + abs(x[i + uint64(128)])


@register_jitable
def _four(x: Any, i: Any) -> Any:
    return _two(x, i) + _two(x, i + uint64(64))


@register_jitable
def _eight(x: Any, i: Any) -> Any:
    return _four(x, i) + _four(x, i + uint64(32))


@register_jitable
def _sum_of_magnitudes(x: Any, begin: Any, lanes: Any) -> Any:
    """Upper half to lower half, eight times; the first four at once, for 16 lanes that meet only then."""
    for lane in range(_LANES):
        i = uint64(begin + lane)
        lanes[lane] = _eight(x, i) + _eight(x, i + uint64(16))
    for half in (8, 4, 2, 1):
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
    return lanes[0]


@register_jitable
def _largest_magnitude(x: Any, begin: Any) -> Any:
    """By bits, whose order is that of the magnitudes, with every NaN above all numbers."""
    most = int32(0)
    for i in range(BLOCK):
        most = max(most, int32(bits_of(x[uint64(begin + i)]) & uint32(0x7FFFFFFF)))
    return float_of(uint32(most))


@register_jitable
def _bfloat16(scale: Any) -> Any:
    word = int64(bits_of(scale))
    if word & 0x7FFFFFFF > INFINITE:
        return int64(NOT_A_NUMBER)
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


@register_jitable
def _widened(half: Any) -> Any:
    return float_of(uint32(half << 16))


@register_jitable
def _scale_of(bits: Any, x: Any, begin: Any, real: Any, lanes: Any) -> Any:
    """As the bits of bfloat16."""
    if bits == 4:
        return _bfloat16(_largest_magnitude(x, begin) / float32(STEPS))
    mean = _sum_of_magnitudes(x, begin, lanes) / float32(real)
    return _bfloat16(mean if bits == 1 else mean * float32(SHARE))


@register_jitable
def _encode_block(bits: Any, x: Any, begin: Any, scale: Any, data: Any, to: Any) -> None:
    if bits == 1:
        for group in range(_GROUPS):
            _encode_1(x, begin + _LANES * group, scale, data, to + 2 * group)
    elif bits == 2:
        for group in range(_GROUPS):
            _encode_2(x, begin + _LANES * group, scale, data, to + 4 * group)
    elif scale > float32(0) and scale < float32(torch.inf):
        for group in range(_GROUPS):
            _encode_4(x, begin + _LANES * group, scale, data, to + 8 * group)
    else:
        for byte in range(BLOCK // 2):
            data[to + byte] = uint8(0x88)


@register_jitable
def _decode_block(bits: Any, data: Any, place: Any, scale: Any, out: Any, to: Any) -> None:
    for group in range(_GROUPS):
        if bits == 1:
            _decode_1(data, place + 2 * group, scale, out, to + _LANES * group)
        elif bits == 2:
            _decode_2(data, place + 4 * group, scale, out, to + _LANES * group)
        else:
            _decode_4(data, place + 8 * group, scale, out, to + _LANES * group)


@register_jitable
def _add_block(bits: Any, data: Any, place: Any, scale: Any, out: Any, to: Any) -> None:
    for group in range(_GROUPS):
        if bits == 1:
            _add_1(data, place + 2 * group, scale, out, to + _LANES * group)
        elif bits == 2:
            _add_2(data, place + 4 * group, scale, out, to + _LANES * group)
        else:
            _add_4(data, place + 8 * group, scale, out, to + _LANES * group)


def _encode(bits: Any, rows: Any, count: Any, values: Any, size: Any, data: Any, room: Any) -> None:
    values, data = floats_at(values, rows * count), bytes_at(data, rows * size)
    filled, lanes = floats_at(room, BLOCK), floats_at(room + 4 * BLOCK, _LANES)
    last = bytes_at(room + 4 * (BLOCK + _LANES), BLOCK)
    blocks = (count + BLOCK - 1) // BLOCK
    for row in range(rows):
        for block in range(blocks):
            begin, scales = row * count + block * BLOCK, row * size + 2 * block
            codes = row * size + 2 * blocks + block * (BLOCK // 8) * bits
            real = min(count - block * BLOCK, BLOCK)
            if real == BLOCK:
                half = _scale_of(bits, values, begin, real, lanes)
                _encode_block(bits, values, begin, _widened(half), data, codes)
            else:
                for i in range(BLOCK):
                    filled[i] = values[begin + i] if i < real else float32(0)
                half = _scale_of(bits, filled, 0, real, lanes)
                _encode_block(bits, filled, 0, _widened(half), last, 0)
                if real * bits % 8:
                    last[real * bits // 8] &= uint8((1 << (real * bits % 8)) - 1)
                for byte in range((real * bits + 7) // 8):
                    data[codes + byte] = last[byte]
            data[scales], data[scales + 1] = uint8(half), uint8(half >> 8)


def _decode(bits: Any, rows: Any, count: Any, size: Any, data: Any, out: Any, room: Any, add: Any) -> None:
    """To as many rows; or, to add them up, to one, block by block, so that the sum stays in the cache."""
    data, out = bytes_at(data, rows * size), floats_at(out, count if add else rows * count)
    filled, last = floats_at(room, BLOCK), bytes_at(room + 4 * (BLOCK + _LANES), BLOCK)
    blocks = (count + BLOCK - 1) // BLOCK
    for outer in range(blocks if add else rows):
        for inner in range(rows if add else blocks):
            row, block = (inner, outer) if add else (outer, inner)
            place, codes = row * size + 2 * block, row * size + 2 * blocks + block * (BLOCK // 8) * bits
            scale = _widened(int64(data[place]) | int64(data[place + 1]) << 8)
            begin = block * BLOCK + (0 if add else row * count)
            real = min(count - block * BLOCK, BLOCK)
            if real < BLOCK:
                for byte in range((real * bits + 7) // 8):
                    last[byte] = data[codes + byte]
                _decode_block(bits, last, 0, scale, filled, 0)
                for i in range(real):
                    out[begin + i] = out[begin + i] + filled[i] if add and row else filled[i]
            elif add and row:
                _add_block(bits, data, codes, scale, out, begin)
            else:
                _decode_block(bits, data, codes, scale, out, begin)


_KERNELS: dict[str, tuple[Callable[..., Any], str]] = {
    "encode": (_encode, "void(int64, int64, int64, int64, int64, int64, int64)"),
    "decode": (_decode, "void(int64, int64, int64, int64, int64, int64, int64, boolean)"),
}


class CompiledLowBit:
    """Both kernels, compiled; machine code is kept on disk where `cache` is set."""

    def __init__(self, cache: bool) -> None:
        self._run = {
            name: njit(signature, nogil=True, cache=cache, error_model="numpy")(kernel)
            for name, (kernel, signature) in _KERNELS.items()
        }

    def encode_low(self, bits: int, values: Tensor) -> Tensor:
        lead, count = values.shape[:-1], values.shape[-1]
        size = size_of(bits, count)
        data, room = torch.empty((*lead, size), dtype=torch.uint8, device=values.device), _room()
        addresses = values.data_ptr(), size, data.data_ptr(), room.data_ptr()
        self._run["encode"](bits, lead.numel(), count, *addresses)
        return data

    def decode_low(self, bits: int, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        lead = data.shape[:-1]
        return self._decoded(bits, data, torch.empty((*lead, count), dtype=dtype, device=data.device), False)

    def decode_low_into(self, bits: int, data: Tensor, out: Tensor) -> None:
        self._decoded(bits, data, out, False)

    def decode_low_sum(self, bits: int, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return self._decoded(bits, data, torch.empty(count, dtype=dtype, device=data.device), True)

    def _decoded(self, bits: int, data: Tensor, out: Tensor, add: bool) -> Tensor:
        rows, count, size, room = data.shape[:-1].numel(), out.shape[-1], data.shape[-1], _room()
        addresses = data.data_ptr(), out.data_ptr(), room.data_ptr()
        self._run["decode"](bits, rows, count, size, *addresses, add)
        return out


def _room() -> Tensor:
    """For a block that is filled up, partial sums, and the block's codes."""
    return torch.zeros(2 * BLOCK + _LANES, dtype=torch.float32, device="cpu")
