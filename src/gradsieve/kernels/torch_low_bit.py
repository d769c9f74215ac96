"""Values in four bits, two or one, with a scale for each block: what the codes mean, in plain torch.

A row of values in blocks of at most 256 (`blocks.py`) becomes the scales of its blocks, then their codes:

    scale   bfloat16, two bytes, the low one first; rounded from float32 to nearest, ties to even
    codes   from a byte of their own on, code j of the block in its bits j * bits up to (j + 1) * bits, lowest
            bits first; spare bits are 0

    bits    scale            code                                       decodes to
    1       mean|x|          1 where x >= 0                             -scale, scale
    2       0.625 mean|x|    low bit: x >= 0; high bit: |x| > 2 scale   -+scale, -+3 scale
    4       max|x| / 7       8 + x / scale, rounded half to even        (code - 8) scale, from -7 scale to 7

Codes of one bit and of two have no zero. A block of them in which some values are 0 and some are not is
written with zeros, in as many bytes: only its elements of one parity are sent, each in twice the bits, and
all others decode to 0, so that their values are sent another time.

    scale   the sign bit is set, which no other scale has. The lowest bit is the parity: 0 for the elements
            0, 2, 4..., 1 for 1, 3, 5..., whichever has the larger sum of |x|, and 0 where both are equal. The
            mean is that of the sent elements that are not 0. Rounded, then the two bits are set; a receiver
            takes the lowest one as a part of the scale
    codes   code j, of element 2 j + parity, in the bits 2 j * bits up to 2 (j + 1) * bits

    bits    code                                                          decodes to
    1       0 for 0; otherwise 1, and 2 where x > 0                       0, -scale, scale
    2       the same, and 4 where |x| > 2 scale                           0, -+scale, -+3 scale

Receivers look at the higher bits only where the lowest one is set. Where the scale with zeros is rounded to 0
or to infinity, that is the scale, and codes are those without zeros: all of the block decodes to zeros, or to
nothing finite. A scale of four bits may have either sign.

0.625 mean|x| is near the best that four even levels can do for a Gaussian. All arithmetic is in the type of
the values, and what depends on the scale takes it as the receiver will: after rounding. The mean is that of
the block filled up with zeros to 256, of which the upper half is added to the lower one eight times, divided
by the number of values it is the mean of: an order that every form can follow to the bit, and in which the
last two to be added are the sums over both parities. No product is fused with a sum.

A block with a value that is not finite, or whose sum is not, is written without zeros, has a scale that is
not finite either, and decodes to nothing finite; the same goes for scales that overflow. A scale of 0 decodes
to zeros.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradsieve.kernels.blocks import (
    BLOCK,
    INFINITE,
    NOT_A_NUMBER,
    SHARE,
    STEPS,
    WITH_ZEROS,
    Blocks,
    closed,
    lengths,
    level_table,
    spread,
)
from gradsieve.kernels.torch_passes import divisor

_TOGETHER = 512  # blocks that are encoded at once on a CPU


def encode_low(bits: int, values: Tensor, blocks: Blocks) -> Tensor:
    """Writes values of shape (..., count) as bytes of shape (..., size)."""
    values = values.detach()
    lead, count = values.shape[:-1], values.shape[-1]
    true = lengths(blocks, values.device)
    filled = spread(values, blocks, true, BLOCK, count)
    inputs = filled.view(-1, BLOCK), true.expand(*lead, blocks.number).reshape(-1)
    parts = [
        _encode_blocks(bits, some, counts)
        for some, counts in zip(*(_pieces(each) for each in inputs), strict=True)
    ]
    halves, codes = (torch.cat(each) for each in zip(*parts, strict=True))
    buffer, total = BLOCK * bits // 8, blocks.size(bits) - 2 * blocks.number
    codes = codes.view(*lead, blocks.number, buffer)
    codes = closed(codes, blocks, (true * bits + 7) // 8, buffer, total)
    return torch.cat([halves.view(*lead, 2 * blocks.number), codes], -1)


def decode_low(bits: int, data: Tensor, out: Tensor, blocks: Blocks, add: bool) -> None:
    """Writes to `out` the values of as many rows of bytes; or, to add them up, their sum in that order."""
    out.copy_(_decoded(bits, data[0] if add else data, out, blocks))
    for row in data[1:] if add else ():
        out += _decoded(bits, row, out, blocks)


def _decoded(bits: int, data: Tensor, out: Tensor, blocks: Blocks) -> Tensor:
    lead, cut = data.shape[:-1], 2 * blocks.number
    halves = data[..., :cut].clone(memory_format=torch.contiguous_format).flatten().view(torch.int16)
    halves = halves.view(*lead, blocks.number)
    true = lengths(blocks, data.device)
    total = data.shape[-1] - cut
    rows = spread(data[..., cut:], blocks, (true * bits + 7) // 8, BLOCK * bits // 8, total).to(torch.int32)
    if bits < 4:
        rows += torch.where(halves < 0, 256 * (1 + (halves.to(torch.int32) & 1)), 0)[..., None]
        halves = halves & 0x7FFF
    scale = halves.view(torch.bfloat16).to(out.dtype)[..., None]
    levels = torch.nn.functional.embedding(rows, level_table(bits, out.device).to(out.dtype))
    return closed(levels.flatten(-2).mul_(scale), blocks, true, BLOCK, out.shape[-1])


def _pieces(blocks: Tensor) -> tuple[Tensor, ...]:
    """Cuts blocks into groups, on a CPU so few at once that what is made of them stays in a core's cache."""
    return torch.split(blocks, _TOGETHER if blocks.is_cpu else max(len(blocks), 1))


def _may_hold(marks: Tensor) -> bool:
    """Says whether any mark is set; on an accelerator always, since the host would wait for it."""
    return not marks.is_cpu or bool(marks.any())


def _encode_blocks(bits: int, blocks: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bytes of the blocks' scales, and of their codes."""
    inside = torch.arange(BLOCK, dtype=torch.int64, device=blocks.device) < true[:, None]
    if bits == 4:
        most = blocks.abs().amax(-1) / divisor(STEPS, blocks)
        halves = _bfloat16(most)
        codes = _four_bits(blocks, halves.view(torch.bfloat16).to(blocks.dtype)[:, None])
        return halves.view(torch.uint8), _pack(bits, codes * inside).flatten()
    sums = _sums_of_parities(blocks.abs())
    whole = sums[:, 0] + sums[:, 1]
    halves = _bfloat16(_level(bits, whole, true))
    sent = (blocks != 0).view(-1, BLOCK // 2, 2)
    mixed = (sent.sum((1, 2)) < true) & (whole > 0) & (whole < math.inf)
    parity = (sums[:, 1] > sums[:, 0]).to(torch.int16)
    if _may_hold(mixed):
        members = sent.sum(1).gather(1, parity.to(torch.int64)[:, None])[:, 0]
        found = _bfloat16(_level(bits, sums.amax(-1), members))
        usable = (found > 0) & (found < INFINITE)
        marked = found & 0x7FFE | parity | (WITH_ZEROS - 0x10000)
        halves = torch.where(mixed, torch.where(usable, marked, found), halves)
    scale = (halves & 0x7FFF).view(torch.bfloat16).to(blocks.dtype)[:, None]
    codes = _codes(bits, blocks, scale) * inside
    if _may_hold(with_zeros := halves < 0):
        codes = torch.where(with_zeros[:, None], _codes_with_zeros(bits, blocks, scale, parity), codes)
    return halves.view(torch.uint8), _pack(bits, codes).flatten()


def _sums_of_parities(magnitude: Tensor) -> Tensor:
    while magnitude.shape[-1] > 2:
        low, high = magnitude.chunk(2, -1)
        magnitude = low + high
    return magnitude


def _level(bits: int, total: Tensor, number: Tensor) -> Tensor:
    """Returns the scale before rounding."""
    mean = total / number.to(total.dtype)
    return mean if bits == 1 else mean * SHARE


def _bfloat16(scale: Tensor) -> Tensor:
    """Returns the bits of bfloat16, by integers: processors differ in denormals, and torch in its NaN."""
    word = scale.to(torch.float32).view(torch.int32)
    nearest = (word + 0x7FFF + (word >> 16 & 1)) >> 16
    return torch.where(scale.isnan(), NOT_A_NUMBER, nearest).to(torch.int16)


def _four_bits(blocks: Tensor, scale: Tensor) -> Tensor:
    """Returns one byte a code, as the functions below do."""
    usable = (scale > 0) & (scale < math.inf)
    steps = torch.where(usable, blocks / scale, 0.0).clamp_(-STEPS, STEPS).round_()
    return steps.add_(8).to(torch.uint8)


def _codes(bits: int, blocks: Tensor, scale: Tensor) -> Tensor:
    sign = (blocks >= 0).view(torch.uint8)
    return sign if bits == 1 else sign | (blocks.abs() > 2 * scale).view(torch.uint8) << 1


def _codes_with_zeros(bits: int, blocks: Tensor, scale: Tensor, parity: Tensor) -> Tensor:
    """Returns a code of twice the bits as two codes, since it lies where the two of its pair would."""
    pairs = blocks.view(-1, BLOCK // 2, 2)
    x = torch.where(parity[:, None] == 0, pairs[..., 0], pairs[..., 1])
    sent, above = (x != 0).view(torch.uint8), (x > 0).view(torch.uint8)
    if bits == 1:
        return torch.stack([sent, above], -1).flatten(1)
    return torch.stack([sent | above << 1, (x.abs() > 2 * scale).view(torch.uint8)], -1).flatten(1)


def _pack(bits: int, codes: Tensor) -> Tensor:
    """Packs one code a byte to eight bits of codes a byte: in words, where neighbours move together."""
    word = codes.view({4: torch.int16, 2: torch.int32, 1: torch.int64}[bits])
    gap = 8 - bits
    while gap < 4 * word.element_size():
        word = word | word >> gap
        gap *= 2
    return (word & 0xFF).to(torch.uint8)
