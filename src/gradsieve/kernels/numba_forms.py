"""Numba's form of the kernels, for contiguous float32 vectors of one length: `gradsieve.kernels` sees
to that, since nothing here checks a bound.

Vectors are passed by address: `Tensor.numpy()` forbids their owner to resize them, for ever. Every kernel
releases the GIL: backward runs in one thread while another one exchanges. Signatures are given, so that numba
compiles when this module is imported and not in some later step. Indices of loops that have to be vectorised
are `uint64`: a signed one is tested for its sign.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, float32, int32, int64, njit, types, uint8, uint32, uint64  # type: ignore[attr-defined]
from numba.extending import register_jitable
from torch import Tensor

from gradsieve.kernels.blocks import (
    BLOCK,
    INFINITE,
    NOT_A_NUMBER,
    SHARE,
    STEPS,
    WITH_ZEROS,
    Blocks,
    level_table,
)

_INFINITE_FLOAT = 0x7F800000  # the bits of infinity; those of every NaN are more
_LARGEST = torch.finfo(torch.float32).max
_GROUP = 64  # elements of which it is asked at once whether any is above the threshold
_EXPECTED = 256  # of so many elements one is expected above the threshold; buffers grow where it is more
_ROUNDER = 1.5 * 2**23  # added to a small float32 and taken away again, it leaves the nearest integer
_HALF = BLOCK // 2


def _compiled(signature: str) -> Any:
    """Compiles a kernel when this module is imported, and keeps its machine code on disk if that is possible:
    numba raises what it finds, no place to write or a broken file."""

    def compiled(kernel: Any) -> Any:
        try:
            return njit(signature, nogil=True, error_model="numpy", cache=True)(kernel)
        except Exception:
            return njit(signature, nogil=True, error_model="numpy")(kernel)

    return compiled


@njit(types.voidptr(types.voidptr))
def _pointer(address):
    """Makes a pointer of an integer, where it is passed."""
    return address


@register_jitable
def _floats(address, n):
    return carray(_pointer(types.uintp(address)), n, np.float32)


@register_jitable
def _integers(address, n):
    return carray(_pointer(types.uintp(address)), n, np.int64)


@register_jitable
def _bytes(address, n):
    return carray(_pointer(types.uintp(address)), n, np.uint8)


@register_jitable
def _bits_of(x):
    return np.float32(x).view(np.uint32)


# -- passes over whole models ----------------------------------------------------------------------------


@register_jitable
def _finite_or_zero(x):
    return x if abs(x) <= float32(_LARGEST) else float32(0)


@register_jitable
def _magnitude(x):
    """Returns bits in the order of the magnitudes, with infinity and every NaN above all numbers."""
    return int32(_bits_of(x) & uint32(0x7FFFFFFF))


@_compiled("boolean(int64, int64, int64, float32, int64)")
def _accumulate(n, residual, gradient, scale, out):
    residual, gradient, out = _floats(residual, n), _floats(gradient, n), _floats(out, n)
    most = int32(0)
    for i in range(n):
        value = scale * residual[i] + gradient[i]
        out[i] = value
        most = max(most, _magnitude(value))
    return most < int32(_INFINITE_FLOAT)


@_compiled("boolean(int64, int64)")
def _is_finite(n, x):
    x = _floats(x, n)
    most = int32(0)
    for i in range(n):
        most = max(most, _magnitude(x[i]))
    return most < int32(_INFINITE_FLOAT)


@_compiled("void(int64, int64, int64, int64)")
def _waiting(n, anchor, own, out):
    anchor, own, out = _floats(anchor, n), _floats(own, n), _floats(out, n)
    for i in range(n):
        out[i] = _finite_or_zero(anchor[i] - own[i])


@_compiled("void(int64, int64, int64, int64, float32)")
def _rebase(n, shared, own, anchor, preview):
    shared, own, anchor = _floats(shared, n), _floats(own, n), _floats(anchor, n)
    for i in range(n):
        residual = _finite_or_zero(anchor[i] - own[i])
        own[i] = shared[i] - preview * residual
        anchor[i] = own[i] + residual


@_compiled("void(int64, int64, int64, int64, int64, int64, float32)")
def _apply(n, shared, own, anchor, update, spent, world):
    shared, own, anchor = _floats(shared, n), _floats(own, n), _floats(anchor, n)
    update, spent = _floats(update, n), _floats(spent, n)
    for i in range(n):
        anchor[i] = own[i] + _finite_or_zero((anchor[i] - own[i]) - spent[i])
        shared[i] -= update[i] / world


@register_jitable
def _value(x, own, is_residual, i):
    return _finite_or_zero(x[i] - own[i]) if is_residual else x[i]


@register_jitable
def _list(x, own, is_residual, threshold, begin, end, found, values, count):
    for i in range(begin, end):
        value = _value(x, own, is_residual, i)
        found[count], values[count] = i, value
        count += abs(value) >= threshold
    return count


@_compiled("UniTuple(int64, 2)(int64, int64, int64, boolean, float32, int64, int64, int64, int64, int64)")
def _above(n, x, own, is_residual, threshold, begin, buffer, found, values, count):
    """Goes on from `begin` until x ends or the buffer is full; returns how far that is, and the count."""
    x, own = _floats(x, n), _floats(own, n)
    found, values = _integers(found, buffer), _floats(values, buffer)
    whole = begin + (n - begin) // _GROUP * _GROUP
    for place in range(begin, whole, _GROUP):
        if count + 2 * _GROUP > buffer:
            return place, count
        any_above = int32(0)  # as wide as an element, or the loop works on half as many at once
        for j in range(_GROUP):
            any_above |= int32(abs(_value(x, own, is_residual, uint64(place + j))) >= threshold)
        if any_above:
            count = _list(x, own, is_residual, threshold, place, place + _GROUP, found, values, count)
    return n, _list(x, own, is_residual, threshold, whole, n, found, values, count)


def accumulate(residual: Tensor, gradient: Tensor, scale: float, out: Tensor) -> bool:
    sources = residual.data_ptr(), gradient.data_ptr(), scale
    return bool(_accumulate(out.numel(), *sources, out.data_ptr()))


def is_finite(x: Tensor) -> bool:
    return bool(_is_finite(x.numel(), x.data_ptr()))


def residual(anchor: Tensor, own: Tensor, out: Tensor) -> None:
    _waiting(out.numel(), anchor.data_ptr(), own.data_ptr(), out.data_ptr())


def rebase(shared: Tensor, own: Tensor, anchor: Tensor, preview: float) -> None:
    _rebase(shared.numel(), shared.data_ptr(), own.data_ptr(), anchor.data_ptr(), preview)


def apply(shared: Tensor, own: Tensor, anchor: Tensor, update: Tensor, spent: Tensor, world: int) -> None:
    _apply(shared.numel(), *(x.data_ptr() for x in (shared, own, anchor, update, spent)), world)


def above(x: Tensor, threshold: float) -> Tensor:
    return _find(x, x, False, threshold)[0]


def residual_above(anchor: Tensor, own: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    return _find(anchor, own, True, threshold)


def _find(x: Tensor, own: Tensor, is_residual: bool, threshold: float) -> tuple[Tensor, Tensor]:
    n, place, count = x.numel(), 0, 0
    sources = x.data_ptr(), own.data_ptr(), is_residual, threshold
    found = torch.empty(n // _EXPECTED + 2 * _GROUP, dtype=torch.int64, device=x.device)
    values = torch.empty(found.numel(), dtype=torch.float32, device=x.device)
    while True:
        place, count = _above(n, *sources, place, found.numel(), found.data_ptr(), values.data_ptr(), count)
        if place == n:
            return found[:count].clone(), values[:count].clone()
        found, values = (torch.cat([full, torch.empty_like(full)]) for full in (found, values))


# -- values in few bits ----------------------------------------------------------------------------------

_TABLE_1, _TABLE_2, _TABLE_4 = (
    level_table(bits, torch.device("cpu")).flatten().numpy() for bits in (1, 2, 4)
)


@register_jitable
def _bfloat16(scale):
    word = int64(_bits_of(scale))
    if word & 0x7FFFFFFF > _INFINITE_FLOAT:
        return int64(NOT_A_NUMBER)
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


@register_jitable
def _widened(half):
    return np.uint32(half << 16).view(np.float32)


@register_jitable
def _level(bits, total, number):
    """Returns the scale, as the bits of bfloat16."""
    mean = total / float32(number)
    return _bfloat16(mean if bits == 1 else mean * float32(SHARE))


@register_jitable
def _sum_parities(x, begin, sums):
    """Sets sums[0] and sums[1] to the sums of |x| over even and odd places of a block; says if any x is 0."""
    zeros = int32(0)
    for i in range(_HALF):
        low, high = abs(x[uint64(begin + i)]), abs(x[uint64(begin + i + _HALF)])
        sums[uint64(i)] = low + high
        zeros |= int32(low == float32(0)) | int32(high == float32(0))
    for half in (64, 32, 16, 8, 4, 2):
        for i in range(half):
            sums[uint64(i)] += sums[uint64(i + half)]
    return zeros != 0


@register_jitable
def _scale_with_zeros(bits, x, begin, even, odd):
    """Returns the scale of the larger parity: zeros that fill a block up are not sent, and not counted."""
    parity = int64(1) if odd > even else int64(0)
    members = int64(0)
    for i in range(_HALF):
        members += x[uint64(begin + 2 * i + parity)] != float32(0)
    half = _level(bits, odd if parity else even, members)
    if half == 0 or half >= INFINITE:
        return half
    return half & 0x7FFE | parity | WITH_ZEROS


@register_jitable
def _scale_of(bits, x, begin, real, sums):
    """Returns the scale of a block that is filled up to 256, as the bits of bfloat16."""
    if bits == 4:
        most = int32(0)
        for i in range(BLOCK):
            most = max(most, _magnitude(x[uint64(begin + i)]))
        return _bfloat16(np.uint32(most).view(np.float32) / float32(STEPS))
    zeros = _sum_parities(x, begin, sums)
    total = sums[0] + sums[1]
    if zeros and total > float32(0) and total < float32(torch.inf):
        if real < BLOCK:
            zeros = False
            for i in range(real):
                zeros |= x[begin + i] == float32(0)
        if zeros:
            return _scale_with_zeros(bits, x, begin, sums[0], sums[1])
    return _level(bits, total, real)


@register_jitable
def _write_sent(bits, x, begin, half, count, data, to):
    """Writes `count` bytes of codes of a block with zeros."""
    first, limit = begin + (half & 1), float32(2) * _widened(half & 0x7FFF)
    for byte in range(count):
        code = uint32(0)
        if bits == 1:
            for j in range(4):
                value = x[uint64(first + 8 * byte + 2 * j)]
                code |= uint32(value != float32(0)) << uint32(2 * j)
                code |= uint32(value > float32(0)) << uint32(2 * j + 1)
        else:
            for j in range(2):
                value = x[uint64(first + 4 * byte + 2 * j)]
                code |= uint32(value != float32(0)) << uint32(4 * j)
                code |= uint32(value > float32(0)) << uint32(4 * j + 1)
                code |= uint32(abs(value) > limit) << uint32(4 * j + 2)
        data[uint64(to + byte)] = uint8(code)


@register_jitable
def _write(bits, x, begin, half, count, data, to):
    """Writes `count` bytes of codes of a block."""
    scale = _widened(half)
    limit = float32(2) * scale
    if bits == 1:
        for byte in range(count):
            code = uint32(0)
            for j in range(8):
                code |= uint32(x[uint64(begin + 8 * byte + j)] >= float32(0)) << uint32(j)
            data[uint64(to + byte)] = uint8(code)
    elif bits == 2:
        for byte in range(count):
            code = uint32(0)
            for j in range(4):
                value = x[uint64(begin + 4 * byte + j)]
                code |= uint32(value >= float32(0)) << uint32(2 * j)
                code |= uint32(abs(value) > limit) << uint32(2 * j + 1)
            data[uint64(to + byte)] = uint8(code)
    elif scale > float32(0) and scale < float32(torch.inf):
        for byte in range(count):
            low = _four_bits(x[uint64(begin + 2 * byte)] / scale)
            high = _four_bits(x[uint64(begin + 2 * byte + 1)] / scale)
            data[uint64(to + byte)] = uint8(low | high << uint32(4))
    else:
        for byte in range(count):
            data[uint64(to + byte)] = uint8(0x88)


@register_jitable
def _four_bits(steps):
    steps = min(max(steps, float32(-STEPS)), float32(STEPS))
    return uint32(int32((steps + float32(_ROUNDER)) - float32(_ROUNDER)) + int32(8))


@_compiled("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def _encode(bits, rows, blocks, edges, values, size, data, buffer):
    edges = _integers(edges, blocks + 1)
    count = edges[blocks] - edges[0]
    values, data = _floats(values, rows * count), _bytes(data, rows * size)
    filled, sums = _floats(buffer, BLOCK), _floats(buffer + 4 * BLOCK, _HALF)
    for row in range(rows):
        scales, codes, begin = row * size, row * size + 2 * blocks, row * count
        for block in range(blocks):
            real = edges[uint64(block + 1)] - edges[uint64(block)]
            x, start = values, begin
            if real < BLOCK:
                x, start = filled, int64(0)
                for i in range(BLOCK):
                    filled[i] = values[begin + i] if i < real else float32(0)
            half = _scale_of(bits, x, start, real, sums)
            there = (real * bits + 7) // 8
            if bits < 4 and half & WITH_ZEROS:
                _write_sent(bits, x, start, half, there, data, codes)
            else:
                _write(bits, x, start, half, there, data, codes)
                if real * bits % 8:
                    data[uint64(codes + there - 1)] &= uint8((1 << (real * bits % 8)) - 1)
            data[uint64(scales)], data[uint64(scales + 1)] = uint8(half), uint8(half >> 8)
            begin, codes, scales = begin + real, codes + there, scales + 2


@register_jitable
def _read(bits, data, place, half, count, out, to):
    """Reads what `count` bytes of codes of a block stand for."""
    rows, scale = int64(0), _widened(half)
    if bits < 4 and half & WITH_ZEROS:
        rows, scale = 256 * (1 + (half & 1)), _widened(half & 0x7FFF)
    if bits == 1:
        for byte in range(count):
            row = uint64(8 * (rows + data[uint64(place + byte)]))
            for j in range(8):
                out[uint64(to + 8 * byte + j)] = _TABLE_1[row + uint64(j)] * scale
    elif bits == 2:
        for byte in range(count):
            row = uint64(4 * (rows + data[uint64(place + byte)]))
            for j in range(4):
                out[uint64(to + 4 * byte + j)] = _TABLE_2[row + uint64(j)] * scale
    else:
        for byte in range(count):
            row = uint64(2) * uint64(data[uint64(place + byte)])
            for j in range(2):
                out[uint64(to + 2 * byte + j)] = _TABLE_4[row + uint64(j)] * scale


@_compiled("void(int64, int64, int64, int64, int64, int64, int64, int64, boolean)")
def _decode(bits, rows, blocks, edges, size, data, out, buffer, add):
    """Reads rows; or adds them up to one, block by block, so that the sum stays in the cache."""
    edges = _integers(edges, blocks + 1)
    count = edges[blocks] - edges[0]
    data, out = _bytes(data, rows * size), _floats(out, count if add else rows * count)
    filled = _floats(buffer, BLOCK)
    for first in range(1 if add else rows):
        scales, codes, begin = first * size, first * size + 2 * blocks, first * count
        for block in range(blocks):
            real = edges[uint64(block + 1)] - edges[uint64(block)]
            there = (real * bits + 7) // 8
            for row in range(0, rows * size if add else 1, size):
                half = int64(data[uint64(scales + row)]) | int64(data[uint64(scales + row + 1)]) << 8
                if row == 0 and real == BLOCK:
                    _read(bits, data, codes, half, there, out, begin)
                    continue
                _read(bits, data, codes + row, half, there, filled, 0)
                for i in range(real):
                    before = out[uint64(begin + i)] if row else float32(-0.0)
                    out[uint64(begin + i)] = before + filled[uint64(i)]
            begin, codes, scales = begin + real, codes + there, scales + 2


def encode_low(bits: int, values: Tensor, blocks: Blocks) -> Tensor:
    lead, size = values.shape[:-1], blocks.size(bits)
    data, buffer = torch.empty((*lead, size), dtype=torch.uint8, device=values.device), _buffer()
    addresses = values.data_ptr(), size, data.data_ptr(), buffer.data_ptr()
    _encode(bits, lead.numel(), blocks.number, blocks.address, *addresses)
    return data


def decode_low(bits: int, data: Tensor, out: Tensor, blocks: Blocks, add: bool) -> None:
    rows, size, buffer = data.shape[:-1].numel(), data.shape[-1], _buffer()
    addresses = blocks.address, size, data.data_ptr(), out.data_ptr(), buffer.data_ptr()
    _decode(bits, rows, blocks.number, *addresses, add)


def _buffer() -> Tensor:
    """Returns memory for a block that is filled up, and partial sums."""
    return torch.empty(BLOCK + _HALF, dtype=torch.float32, device="cpu")
