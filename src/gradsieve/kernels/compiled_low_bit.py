"""Values in four bits, two or one, compiled for this CPU by numba: the bytes of `low_bit.py` at less cost.

For contiguous float32 on the CPU, under the same rules as `compiled.py`. Elements of full blocks are
coded 16 at once (`lanes.py`), in a block with zeros too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numba import float32, int32, int64, njit, uint8, uint32, uint64
from numba.extending import register_jitable
from torch import Tensor

from gradsieve.kernels.blocks import BLOCK, Blocks, even
from gradsieve.kernels.lanes import (
    LANES,
    add_1,
    add_2,
    add_4,
    add_sent_1,
    add_sent_2,
    count_sent,
    decode_1,
    decode_2,
    decode_4,
    decode_sent_1,
    decode_sent_2,
    encode_1,
    encode_2,
    encode_4,
    encode_sent_1,
    encode_sent_2,
    rebase,
)
from gradsieve.kernels.low_bit import INFINITE, NOT_A_NUMBER, SHARE, STEPS, WITH_ZEROS
from gradsieve.kernels.pointers import INFINITE as INFINITE_FLOAT
from gradsieve.kernels.pointers import bits_of, bytes_at, float_of, floats_at, integers_at

_GROUPS = BLOCK // LANES
_PAIRS = _GROUPS // 2
"""Groups of 16 values that are sent, in a block with zeros."""


@register_jitable
def _sum_parities(x: Any, begin: Any, lanes: Any) -> Any:
    """lanes[0] and lanes[1] = the sums of |x| over even and odd places; whether any x is 0."""
    zeros = rebase(x, begin, lanes)
    for half in (8, 4, 2):
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
    return zeros


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
    if word & 0x7FFFFFFF > INFINITE_FLOAT:
        return int64(NOT_A_NUMBER)
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16


@register_jitable
def _widened(half: Any) -> Any:
    return float_of(uint32(half << 16))


@register_jitable
def _level(bits: Any, total: Any, number: Any) -> Any:
    """The scale, as the bits of bfloat16."""
    mean = total / float32(number)
    return _bfloat16(mean if bits == 1 else mean * float32(SHARE))


@register_jitable
def _scale_with_zeros(bits: Any, x: Any, begin: Any, even_sum: Any, odd_sum: Any) -> Any:
    """Zeros that fill a block up are not sent, and not counted."""
    parity = int64(1) if odd_sum > even_sum else int64(0)
    members = int64(0)
    for group in range(_PAIRS):
        members += count_sent(x, begin + 2 * LANES * group, parity)
    half = _level(bits, odd_sum if parity else even_sum, members)
    if half == 0 or half >= INFINITE:
        return half
    return half & 0x7FFE | parity | WITH_ZEROS


@register_jitable
def _scale_of(bits: Any, x: Any, begin: Any, real: Any, lanes: Any) -> Any:
    """Of a block that is filled up to 256, as the bits of bfloat16."""
    if bits == 4:
        return _bfloat16(_largest_magnitude(x, begin) / float32(STEPS))
    zeros = _sum_parities(x, begin, lanes)
    total = lanes[0] + lanes[1]
    if zeros and total > float32(0) and total < float32(torch.inf):
        if real < BLOCK:
            zeros = False
            for i in range(real):
                zeros |= x[begin + i] == float32(0)
        if zeros:
            return _scale_with_zeros(bits, x, begin, lanes[0], lanes[1])
    return _level(bits, total, real)


@register_jitable
def _encode_with_zeros(bits: Any, x: Any, begin: Any, half: Any, data: Any, to: Any) -> None:
    """Of a block that is filled up to 256."""
    scale, parity = _widened(half & 0x7FFF), half & 1
    for group in range(_PAIRS):
        if bits == 1:
            encode_sent_1(x, begin + 2 * LANES * group, parity, scale, data, to + 4 * group)
        else:
            encode_sent_2(x, begin + 2 * LANES * group, parity, scale, data, to + 8 * group)


@register_jitable
def _decode_with_zeros(bits: Any, data: Any, place: Any, half: Any, out: Any, to: Any) -> None:
    """To a full block."""
    scale, parity = _widened(half & 0x7FFF), half & 1
    for group in range(_PAIRS):
        if bits == 1:
            decode_sent_1(data, place + 4 * group, parity, scale, out, to + 2 * LANES * group)
        else:
            decode_sent_2(data, place + 8 * group, parity, scale, out, to + 2 * LANES * group)


@register_jitable
def _add_with_zeros(bits: Any, data: Any, place: Any, half: Any, out: Any, to: Any) -> None:
    scale, parity = _widened(half & 0x7FFF), half & 1
    for group in range(_PAIRS):
        if bits == 1:
            add_sent_1(data, place + 4 * group, parity, scale, out, to + 2 * LANES * group)
        else:
            add_sent_2(data, place + 8 * group, parity, scale, out, to + 2 * LANES * group)


@register_jitable
def _encode_block(bits: Any, x: Any, begin: Any, half: Any, data: Any, to: Any) -> None:
    scale = _widened(half)
    if bits < 4 and half & WITH_ZEROS:
        _encode_with_zeros(bits, x, begin, half, data, to)
    elif bits == 1:
        for group in range(_GROUPS):
            encode_1(x, begin + LANES * group, scale, data, to + 2 * group)
    elif bits == 2:
        for group in range(_GROUPS):
            encode_2(x, begin + LANES * group, scale, data, to + 4 * group)
    elif scale > float32(0) and scale < float32(torch.inf):
        for group in range(_GROUPS):
            encode_4(x, begin + LANES * group, scale, data, to + 8 * group)
    else:
        for byte in range(BLOCK // 2):
            data[to + byte] = uint8(0x88)


@register_jitable
def _decode_block(bits: Any, data: Any, place: Any, scale: Any, out: Any, to: Any) -> None:
    for group in range(_GROUPS):
        if bits == 1:
            decode_1(data, place + 2 * group, scale, out, to + LANES * group)
        elif bits == 2:
            decode_2(data, place + 4 * group, scale, out, to + LANES * group)
        else:
            decode_4(data, place + 8 * group, scale, out, to + LANES * group)


@register_jitable
def _add_block(bits: Any, data: Any, place: Any, scale: Any, out: Any, to: Any) -> None:
    for group in range(_GROUPS):
        if bits == 1:
            add_1(data, place + 2 * group, scale, out, to + LANES * group)
        elif bits == 2:
            add_2(data, place + 4 * group, scale, out, to + LANES * group)
        else:
            add_4(data, place + 8 * group, scale, out, to + LANES * group)


@register_jitable
def _encode_short(
    bits: Any, values: Any, begin: Any, real: Any, data: Any, to: Any, filled: Any, lanes: Any, last: Any
) -> Any:
    """A block of fewer than 256; its scale."""
    for i in range(BLOCK):
        filled[i] = values[begin + i] if i < real else float32(0)
    half = _scale_of(bits, filled, 0, real, lanes)
    _encode_block(bits, filled, 0, half, last, 0)
    if real * bits % 8 and (bits == 4 or not half & WITH_ZEROS):
        last[real * bits // 8] &= uint8((1 << (real * bits % 8)) - 1)
    for byte in range((real * bits + 7) // 8):
        data[to + byte] = last[byte]
    return half


def _encode(
    bits: Any, rows: Any, blocks: Any, edges: Any, values: Any, size: Any, data: Any, buffer: Any
) -> None:
    edges = integers_at(edges, blocks + 1)
    count = edges[blocks] - edges[0]
    values, data = floats_at(values, rows * count), bytes_at(data, rows * size)
    filled, lanes = floats_at(buffer, BLOCK), floats_at(buffer + 4 * BLOCK, LANES)
    last = bytes_at(buffer + 4 * (BLOCK + LANES), BLOCK)
    for row in range(rows):
        scales, codes, begin, edge = row * size, row * size + 2 * blocks, row * count, edges[0]
        for block in range(blocks):
            real = edges[uint64(block + 1)] - edge
            if real == BLOCK:
                half = _scale_of(bits, values, begin, BLOCK, lanes)
                _encode_block(bits, values, begin, half, data, codes)
                codes += (BLOCK // 8) * bits
            else:
                half = _encode_short(bits, values, begin, real, data, codes, filled, lanes, last)
                codes += (real * bits + 7) // 8
            data[uint64(scales)], data[uint64(scales + 1)] = uint8(half), uint8(half >> 8)
            begin, edge, scales = begin + real, edge + real, scales + 2


@register_jitable
def _decode_part(
    bits: Any,
    data: Any,
    place: Any,
    half: Any,
    real: Any,
    out: Any,
    to: Any,
    add: Any,
    filled: Any,
    last: Any,
) -> None:
    """A block that is short."""
    for byte in range((real * bits + 7) // 8):
        last[byte] = data[place + byte]
    if bits < 4 and half & WITH_ZEROS:
        _decode_with_zeros(bits, last, 0, half, filled, 0)
    else:
        _decode_block(bits, last, 0, _widened(half), filled, 0)
    for i in range(real):
        out[to + i] = out[to + i] + filled[i] if add else filled[i]


@register_jitable
def _half_at(data: Any, place: Any) -> Any:
    return int64(data[uint64(place)]) | int64(data[uint64(place + 1)]) << 8


@register_jitable
def _has_zeros(bits: Any, half: Any) -> Any:
    return bits < 4 and half >= WITH_ZEROS


def _decode(
    bits: Any, rows: Any, blocks: Any, edges: Any, size: Any, data: Any, out: Any, buffer: Any, add: Any
) -> None:
    """To as many rows; or, to add them up, to one, block by block, so that the sum stays in the cache."""
    edges = integers_at(edges, blocks + 1)
    count = edges[blocks] - edges[0]
    data, out = bytes_at(data, rows * size), floats_at(out, count if add else rows * count)
    filled, last = floats_at(buffer, BLOCK), bytes_at(buffer + 4 * (BLOCK + LANES), BLOCK)
    for first in range(1 if add else rows):
        scales, codes, begin, edge = first * size, first * size + 2 * blocks, first * count, edges[0]
        for block in range(blocks):
            real = edges[uint64(block + 1)] - edge
            half = _half_at(data, scales)
            if real < BLOCK:
                _decode_part(bits, data, codes, half, real, out, begin, False, filled, last)
            elif _has_zeros(bits, half):
                _decode_with_zeros(bits, data, codes, half, out, begin)
            else:
                _decode_block(bits, data, codes, _widened(half), out, begin)
            for later in range(size, rows * size if add else 0, size):
                half = _half_at(data, scales + later)
                if real < BLOCK:
                    _decode_part(bits, data, codes + later, half, real, out, begin, True, filled, last)
                elif _has_zeros(bits, half):
                    _add_with_zeros(bits, data, codes + later, half, out, begin)
                else:
                    _add_block(bits, data, codes + later, _widened(half), out, begin)
            codes += (real * bits + 7) // 8
            begin, edge, scales = begin + real, edge + real, scales + 2


_KERNELS: dict[str, tuple[Callable[..., Any], str]] = {
    "encode": (_encode, "void(int64, int64, int64, int64, int64, int64, int64, int64)"),
    "decode": (_decode, "void(int64, int64, int64, int64, int64, int64, int64, int64, boolean)"),
}


class CompiledLowBit:
    """Both kernels, compiled; machine code is kept on disk where `cache` is set."""

    def __init__(self, cache: bool) -> None:
        self._run = {
            name: njit(signature, nogil=True, cache=cache, error_model="numpy")(kernel)
            for name, (kernel, signature) in _KERNELS.items()
        }

    def encode_low(self, bits: int, values: Tensor, blocks: Blocks | None = None) -> Tensor:
        lead, blocks = values.shape[:-1], blocks or even(values.shape[-1])
        size = blocks.size(bits)
        data, buffer = torch.empty((*lead, size), dtype=torch.uint8, device=values.device), _buffer()
        addresses = values.data_ptr(), size, data.data_ptr(), buffer.data_ptr()
        self._run["encode"](bits, lead.numel(), blocks.number, blocks.address, *addresses)
        return data

    def decode_low(
        self, bits: int, data: Tensor, count: int, dtype: torch.dtype, blocks: Blocks | None = None
    ) -> Tensor:
        out = torch.empty((*data.shape[:-1], count), dtype=dtype, device=data.device)
        return self._decoded(bits, data, out, blocks, False)

    def decode_low_into(self, bits: int, data: Tensor, out: Tensor, blocks: Blocks | None = None) -> None:
        self._decoded(bits, data, out, blocks, False)

    def decode_low_sum(
        self, bits: int, data: Tensor, count: int, dtype: torch.dtype, blocks: Blocks | None = None
    ) -> Tensor:
        out = torch.empty(count, dtype=dtype, device=data.device)
        return self._decoded(bits, data, out, blocks, True)

    def _decoded(self, bits: int, data: Tensor, out: Tensor, blocks: Blocks | None, add: bool) -> Tensor:
        rows, size, buffer = data.shape[:-1].numel(), data.shape[-1], _buffer()
        blocks = blocks or even(out.shape[-1])
        addresses = blocks.address, size, data.data_ptr(), out.data_ptr(), buffer.data_ptr()
        self._run["decode"](bits, rows, blocks.number, *addresses, add)
        return out


def _buffer() -> Tensor:
    """For a block that is filled up, partial sums, and the block's codes."""
    return torch.zeros(2 * BLOCK + LANES, dtype=torch.float32, device="cpu")
