"""Values in four bits, two or one, for CUDA in Triton: the bytes of `low_bit.py`, a program for each block.

Divisions are the correctly rounded ones, and no product is fused with a sum. Tested under Triton's
interpreter only; `try_out` decides on a real device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsieve.kernels import low_bit
from gradsieve.kernels.low_bit import BLOCK, blocks_of, size_of

__all__ = ["decode_low", "decode_low_sum", "encode_low", "try_out"]


@triton.jit
def _mean(magnitude, real):  # type: ignore[no-untyped-def]
    """Upper half to lower half, eight times: sums of two, whose order does not matter."""
    magnitude = tl.sum(tl.reshape(magnitude, [2, 128]), 0)
    magnitude = tl.sum(tl.reshape(magnitude, [2, 64]), 0)
    magnitude = tl.sum(tl.reshape(magnitude, [2, 32]), 0)
    magnitude = tl.sum(tl.reshape(magnitude, [2, 16]), 0)
    magnitude = tl.sum(tl.reshape(magnitude, [2, 8]), 0)
    magnitude = tl.sum(tl.reshape(magnitude, [2, 4]), 0)
    magnitude = tl.sum(tl.reshape(magnitude, [2, 2]), 0)
    return tl.div_rn(tl.sum(magnitude, 0), real)


@triton.jit  # type: ignore[untyped-decorator]
def _encode(values, data, count, size, blocks, bits: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    block, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = block * width + tl.arange(0, width)
    inside = place < count
    x = tl.load(values + row * count + place, mask=inside, other=0.0)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if bits == 4:
        most = tl.max(magnitude, 0)  # by bits: every NaN is above all numbers
        scale = tl.div_rn(most.to(tl.float32, bitcast=True), 7.0)
    else:
        scale = _mean(tl.abs(x), tl.minimum(count - block * width, width).to(tl.float32))
        if bits == 2:
            scale = scale * 0.625
    word = scale.to(tl.int32, bitcast=True)
    half = tl.where((word & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, (word + 0x7FFF + ((word >> 16) & 1)) >> 16)
    scale = (half << 16).to(tl.float32, bitcast=True)
    if bits == 4:
        usable = (scale > 0.0) & (scale < float("inf"))
        steps = tl.div_rn(x, tl.where(usable, scale, 1.0))
        steps = tl.where(steps > 7.0, 7.0, tl.where(steps < -7.0, -7.0, steps))
        steps = (tl.where(usable, steps, 0.0) + 12582912.0) - 12582912.0  # the nearest integer, ties to even
        code = steps.to(tl.int32) + 8
    else:
        code = (x >= 0.0).to(tl.int32)
        if bits == 2:
            code = code | ((tl.abs(x) > 2.0 * scale).to(tl.int32) << 1)
    code = tl.reshape(tl.where(inside, code, 0), [width * bits // 8, 8 // bits])
    byte = tl.sum(code << (tl.arange(0, 8 // bits) * bits)[None, :], 1)
    start = data + row * size
    tl.store(start + 2 * block, (half & 0xFF).to(tl.uint8))
    tl.store(start + 2 * block + 1, (half >> 8).to(tl.uint8))
    to = 2 * blocks + block * (width * bits // 8) + tl.arange(0, width * bits // 8)
    tl.store(start + to, byte.to(tl.uint8), mask=to < size)


@triton.jit  # type: ignore[untyped-decorator]
def _decoded(start, block, blocks, place, inside, bits: tl.constexpr):  # type: ignore[no-untyped-def]
    """What one row's codes at these places stand for."""
    low = tl.load(start + 2 * block).to(tl.int32)
    high = tl.load(start + 2 * block + 1).to(tl.int32)
    scale = ((low | (high << 8)) << 16).to(tl.float32, bitcast=True)
    byte = tl.load(start + 2 * blocks + place * bits // 8, mask=inside, other=0).to(tl.int32)
    code = (byte >> (place * bits % 8).to(tl.int32)) & ((1 << bits) - 1)
    level = code - 8 if bits == 4 else (2 * (code & 1) - 1) * (1 + (code & 2))
    return level.to(tl.float32) * scale


@triton.jit  # type: ignore[untyped-decorator]
def _decode(data, out, rows, count, size, blocks, bits: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of so many rows from that of the program on."""
    block, first = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = block * width + tl.arange(0, width)
    inside = place < count
    start = data + first * size
    total = _decoded(start, block, blocks, place, inside, bits)
    for _ in range(1, rows):
        start += size
        total += _decoded(start, block, blocks, place, inside, bits)
    tl.store(out + first * count + place, total, mask=inside)


def encode_low(bits: int, values: Tensor) -> Tensor:
    lead, count = values.shape[:-1], values.shape[-1]
    size, blocks = size_of(bits, count), blocks_of(count)
    data = torch.empty((*lead, size), dtype=torch.uint8, device=values.device)
    if data.numel():
        with _on(values):
            _encode[(blocks, lead.numel())](
                values, data, count, size, blocks, bits=bits, width=BLOCK, enable_fp_fusion=False
            )
    return data


def decode_low(bits: int, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty((*data.shape[:-1], count), dtype=dtype, device=data.device)
    return _launched(bits, data, out, data.shape[:-1].numel(), 1)


def decode_low_into(bits: int, data: Tensor, out: Tensor) -> None:
    _launched(bits, data, out, data.shape[:-1].numel(), 1)


def decode_low_sum(bits: int, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return _launched(bits, data, torch.empty(count, dtype=dtype, device=data.device), 1, len(data))


def _launched(bits: int, data: Tensor, out: Tensor, programs: int, rows: int) -> Tensor:
    count, size = out.shape[-1], data.shape[-1]
    blocks = blocks_of(count)
    if out.numel():
        with _on(data):
            _decode[(blocks, programs)](
                data, out, rows, count, size, blocks, bits=bits, width=BLOCK, enable_fp_fusion=False
            )
    return out


def try_out(device: torch.device) -> None:
    """Raise where these kernels do not compile there, or give other bits than torch does."""
    x = torch.arange(-1000.0, 1001.0, dtype=torch.float32, device=device).div_(3).view(3, -1).contiguous()
    count = x.shape[1]
    for bits in (1, 2, 4):
        data = encode_low(bits, x)
        alike = torch.equal(data, low_bit.encode_low(bits, x))
        for ours, theirs in ((decode_low, low_bit.decode_low), (decode_low_sum, low_bit.decode_low_sum)):
            alike &= torch.equal(ours(bits, data, count, x.dtype), theirs(bits, data, count, x.dtype))
        if not alike:
            raise RuntimeError(f"Triton's kernels for {bits} bits do not answer as torch's on {device}")


def _on(x: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device, which need not be that of x."""
    return torch.cuda.device_of(x)  # type: ignore[no-untyped-call]
