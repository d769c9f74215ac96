"""Values in four bits, two or one, with a scale for each block: what the codes mean, in plain torch.

A row of `count` values becomes the scales of its blocks of 256 (the last may be shorter), then its codes:

    scale   bfloat16, two bytes, the low one first; rounded from float32 to nearest, ties to even
    codes   code j of the row in the bits j * bits up to (j + 1) * bits, lowest bits first; spare bits are 0

    bits    scale            code                                       decodes to
    1       mean|x|          1 where x >= 0                             -scale, scale
    2       0.625 mean|x|    low bit: x >= 0; high bit: |x| > 2 scale   -+scale, -+3 scale
    4       max|x| / 7       8 + x / scale, rounded half to even        (code - 8) scale, from -7 scale to 7

0.625 mean|x| is near the best that four even levels can do for a Gaussian. All arithmetic is in the type of
the values, and what depends on the scale takes it as the receiver will: after rounding. The mean is that of
the block filled up with zeros to 256, of which the upper half is added to the lower one eight times, divided
by the number of true values: an order that every form can follow to the bit. No product is fused with a sum.

A block with a value that is not finite has a scale that is none either, and decodes to nothing finite; the
same goes for sums and scales that overflow. A scale of 0 decodes to zeros.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 256
SHARE = 0.625
"""Of mean|x|, the lower of two levels."""
STEPS = 7
"""The largest code of four bits, as a number."""
NOT_A_NUMBER = 0x7FC0
"""The one NaN that is sent, as bfloat16: which one arithmetic gives depends on the machine."""
_TOGETHER = 512
"""Blocks that are encoded at once on a CPU."""


def blocks_of(count: int) -> int:
    return -(-count // BLOCK)


def size_of(bits: int, count: int) -> int:
    """Bytes of a row of `count` values."""
    return 2 * blocks_of(count) + -(-count * bits // 8)


def encode_low(bits: int, values: Tensor) -> Tensor:
    """Of values of shape (..., count) the bytes of shape (..., size)."""
    values = values.detach()
    lead, count = values.shape[:-1], values.shape[-1]
    spare = -count % BLOCK
    filled = torch.nn.functional.pad(values, (0, spare)) if spare else values.contiguous()
    blocks = blocks_of(count)
    left = torch.arange(count, 0, -BLOCK, dtype=torch.int64, device=values.device).clamp_(max=BLOCK)
    true = left.to(values.dtype).expand(*lead, blocks).reshape(-1)
    parts = [
        _encode_blocks(bits, some, counts)
        for some, counts in zip(*(_pieces(each) for each in (filled.view(-1, BLOCK), true)), strict=True)
    ]
    halves, codes = (torch.cat(each).view(*lead, -1) for each in zip(*parts, strict=True))
    row = torch.cat([halves, codes[..., : -(-count * bits // 8)]], -1)
    if beyond := count * bits % 8:
        row[..., -1] &= (1 << beyond) - 1
    return row


def decode_low(bits: int, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Of bytes of shape (..., size) the values of shape (..., count)."""
    blocks, per_byte = blocks_of(count), 8 // bits
    cut = 2 * blocks
    halves = data[..., :cut].clone(memory_format=torch.contiguous_format).flatten()
    scale = halves.view(torch.bfloat16).view(*data.shape[:-1], blocks).to(dtype)
    codes = torch.nn.functional.pad(data[..., cut:], (0, blocks * BLOCK // per_byte - (data.shape[-1] - cut)))
    levels = torch.nn.functional.embedding(codes.to(torch.int32), _levels(bits, dtype, data.device))
    decoded = levels.view(*data.shape[:-1], blocks, BLOCK).mul_(scale[..., None])
    return decoded.flatten(-2)[..., :count].contiguous()


def decode_low_into(bits: int, data: Tensor, out: Tensor) -> None:
    out.copy_(decode_low(bits, data, out.shape[-1], out.dtype))


def decode_low_sum(bits: int, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Of bytes of shape (rows, size) the sum of the rows' values, added up in the order of the rows."""
    total = decode_low(bits, data[0], count, dtype)
    for row in data[1:]:
        total += decode_low(bits, row, count, dtype)
    return total


def _pieces(blocks: Tensor) -> tuple[Tensor, ...]:
    """On a CPU, so few blocks at once that what is made of them stays in a core's cache."""
    return torch.split(blocks, _TOGETHER if blocks.is_cpu else max(len(blocks), 1))


def _encode_blocks(bits: int, blocks: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of their scales, and of their codes."""
    halves = _bfloat16(_scales(bits, blocks, true))
    codes = _codes(bits, blocks, halves.view(torch.bfloat16).to(blocks.dtype)[:, None])
    return halves.view(torch.uint8), _pack(bits, codes).flatten()


def _scales(bits: int, blocks: Tensor, true: Tensor) -> Tensor:
    """Before rounding. Divisors are tensors: for a number, CUDA multiplies with its inverse."""
    magnitude = blocks.abs()
    if bits == 4:
        return magnitude.amax(-1) / torch.full((), STEPS, dtype=blocks.dtype, device=blocks.device)
    while magnitude.shape[-1] > 1:
        low, high = magnitude.chunk(2, -1)
        magnitude = low + high
    mean = magnitude[..., 0] / true
    return mean if bits == 1 else mean * SHARE


def _bfloat16(scale: Tensor) -> Tensor:
    """The bits of bfloat16, by integers: processors differ in denormals, and torch in its NaN."""
    word = scale.to(torch.float32).view(torch.int32)
    nearest = (word + 0x7FFF + (word >> 16 & 1)) >> 16
    return torch.where(scale.isnan(), NOT_A_NUMBER, nearest).to(torch.int16)


def _codes(bits: int, blocks: Tensor, scale: Tensor) -> Tensor:
    """One byte a code."""
    if bits == 4:
        usable = (scale > 0) & (scale < math.inf)
        steps = torch.where(usable, blocks / scale, 0.0).clamp_(-STEPS, STEPS).round_()
        return steps.add_(8).to(torch.uint8)
    sign = (blocks >= 0).view(torch.uint8)
    return sign if bits == 1 else sign | (blocks.abs() > 2 * scale).view(torch.uint8) << 1


def _pack(bits: int, codes: Tensor) -> Tensor:
    """Eight bits of codes a byte, from one code a byte: in words, where neighbours move together."""
    word = codes.view({4: torch.int16, 2: torch.int32, 1: torch.int64}[bits])
    gap = 8 - bits
    while gap < 4 * word.element_size():
        word = word | word >> gap
        gap *= 2
    return (word & 0xFF).to(torch.uint8)


def _levels(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What the codes in each of 256 bytes stand for, in units of the scale."""
    byte = torch.arange(256, dtype=torch.int32, device=device)
    place = torch.arange(0, 8, bits, dtype=torch.int32, device=device)
    code = byte[:, None] >> place & (1 << bits) - 1
    level = code - 8 if bits == 4 else (2 * (code & 1) - 1) * (1 + 2 * (code >> 1))
    return level.to(dtype)
