"""Values in four bits, two or one, for CUDA in Triton: the bytes of `torch_low_bit.py`, a block a program.

Divisions are the correctly rounded ones, and no product is fused with a sum. Tested under Triton's
interpreter only; `try_out` decides on a real device.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsieve.kernels import torch_low_bit
from gradsieve.kernels.blocks import BLOCK, Blocks, block_layout
from gradsieve.kernels.triton_passes import bits_of_bfloat16, on


@triton.jit
def _sums_of_parities(magnitude):  # type: ignore[no-untyped-def]
    """Adds the upper half to the lower one seven times: sums of two, whose order does not matter. Returns the
    sum over even places, then over odd ones."""
    magnitude = tl.sum(tl.reshape(magnitude, [2, 128]), 0)
    magnitude = tl.sum(tl.reshape(magnitude, [2, 64]), 0)
    magnitude = tl.sum(tl.reshape(magnitude, [2, 32]), 0)
    magnitude = tl.sum(tl.reshape(magnitude, [2, 16]), 0)
    magnitude = tl.sum(tl.reshape(magnitude, [2, 8]), 0)
    magnitude = tl.sum(tl.reshape(magnitude, [2, 4]), 0)
    magnitude = tl.sum(tl.reshape(magnitude, [2, 2]), 0)
    is_odd = tl.arange(0, 2) == 1
    return tl.sum(tl.where(is_odd, 0.0, magnitude), 0), tl.sum(tl.where(is_odd, magnitude, 0.0), 0)


@triton.jit(do_not_specialize=["values", "data", "edges", "places", "count", "size", "blocks"])  # type: ignore[untyped-decorator]
def _encode(values, data, edges, places, count, size, blocks, bits: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    block, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin = tl.load(edges + block)
    real = tl.load(edges + block + 1) - begin
    i = tl.arange(0, width)
    inside = i < real
    x = tl.load(values + row * count + (begin - tl.load(edges)) + i, mask=inside, other=0.0)
    if bits == 4:
        most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)  # by bits: every NaN is above all numbers
        half = bits_of_bfloat16(tl.div_rn(most.to(tl.float32, bitcast=True), 7.0)).to(tl.int32)
        scale = (half << 16).to(tl.float32, bitcast=True)
        usable = (scale > 0.0) & (scale < float("inf"))
        steps = tl.div_rn(x, tl.where(usable, scale, 1.0))
        steps = tl.where(steps > 7.0, 7.0, tl.where(steps < -7.0, -7.0, steps))
        steps = (tl.where(usable, steps, 0.0) + 12582912.0) - 12582912.0  # the nearest integer, ties to even
        code = tl.where(inside, steps.to(tl.int32) + 8, 0)
        shift = (i * bits) % 8
    else:
        even, odd = _sums_of_parities(tl.abs(x))
        total = even + odd
        some = x != 0.0
        both = tl.sum(some.to(tl.int32) << (i % 2 * 16), 0)  # of even places below, of odd ones above
        mixed = ((both & 0xFFFF) + (both >> 16) < real) & (total > 0.0) & (total < float("inf"))
        parity = (odd > even).to(tl.int32)
        sent = some & (i % 2 == parity)
        members = tl.maximum((both >> parity * 16) & 0xFFFF, 1)
        scale = tl.where(
            mixed,
            tl.div_rn(tl.where(odd > even, odd, even), members.to(tl.float32)),
            tl.div_rn(total, real.to(tl.float32)),
        )
        if bits == 2:
            scale = scale * 0.625
        half = bits_of_bfloat16(scale).to(tl.int32)
        with_zeros = mixed & (half > 0) & (half < 0x7F80)
        half = tl.where(with_zeros, (half & 0x7FFE) | parity | 0x8000, half)
        scale = ((half & 0x7FFF) << 16).to(tl.float32, bitcast=True)
        code = (x >= 0.0).to(tl.int32)
        wide = 1 | ((x > 0.0).to(tl.int32) << 1)
        if bits == 2:
            beyond = (tl.abs(x) > 2.0 * scale).to(tl.int32)
            code = code | (beyond << 1)
            wide = wide | (beyond << 2)
        code = tl.where(with_zeros, tl.where(sent, wide, 0), tl.where(inside, code, 0))
        shift = tl.where(with_zeros, i // 2 * 2 * bits, i * bits) % 8
    byte = tl.sum(tl.reshape(code << shift, [width * bits // 8, 8 // bits]), 1)
    start = data + row * size
    tl.store(start + 2 * block, (half & 0xFF).to(tl.uint8))
    tl.store(start + 2 * block + 1, (half >> 8).to(tl.uint8))
    to = tl.arange(0, width * bits // 8)
    codes = start + 2 * blocks + (tl.load(places + block) - tl.load(places))
    tl.store(codes + to, byte.to(tl.uint8), mask=to < (real * bits + 7) // 8)


@triton.jit  # type: ignore[untyped-decorator]
def _decoded(start, codes, block, i, inside, bits: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads one row's codes at these places of a block, given where codes begin in a row."""
    low = tl.load(start + 2 * block).to(tl.int32)
    high = tl.load(start + 2 * block + 1).to(tl.int32)
    half = low | (high << 8)
    if bits == 4:
        byte = tl.load(start + codes + i * bits // 8, mask=inside, other=0).to(tl.int32)
        level = ((byte >> (i * bits % 8)) & 15) - 8
    else:
        with_zeros = half >= 0x8000
        place = tl.where(with_zeros, i // 2 * 2 * bits, i * bits)
        byte = tl.load(start + codes + place // 8, mask=inside, other=0).to(tl.int32)
        code = byte >> (place % 8)
        sent = (code & 1) * (i % 2 == (half & 1)).to(tl.int32) * ((code & 2) - 1)
        level = 2 * (code & 1) - 1
        if bits == 2:
            sent = sent * (1 + ((code >> 1) & 2))
            level = level * (1 + (code & 2))
        level = tl.where(with_zeros, sent, level)
        half = half & 0x7FFF
    return level.to(tl.float32) * (half << 16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["data", "out", "edges", "places", "rows", "count", "size", "blocks"])  # type: ignore[untyped-decorator]
def _decode(data, out, edges, places, rows, count, size, blocks, bits: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds up rows from the program's own on."""
    block, first = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin = tl.load(edges + block)
    i = tl.arange(0, width)
    inside = i < tl.load(edges + block + 1) - begin
    codes = 2 * blocks + (tl.load(places + block) - tl.load(places))
    start = data + first * size
    total = _decoded(start, codes, block, i, inside, bits)
    for _ in range(1, rows):
        start += size
        total += _decoded(start, codes, block, i, inside, bits)
    tl.store(out + first * count + (begin - tl.load(edges)) + i, total, mask=inside)


def encode_low(bits: int, values: Tensor, blocks: Blocks) -> Tensor:
    lead, count, size = values.shape[:-1], values.shape[-1], blocks.size(bits)
    data = torch.empty((*lead, size), dtype=torch.uint8, device=values.device)
    if data.numel():
        with on(values):
            _encode[(blocks.number, lead.numel())](
                *(values, data, *blocks.on(values.device, bits), count, size, blocks.number),
                bits=bits,
                width=BLOCK,
                num_warps=1,  # a block to itself: lanes of one warp exchange what others need barriers for
                enable_fp_fusion=False,
            )
    return data


def decode_low(bits: int, data: Tensor, out: Tensor, blocks: Blocks, add: bool) -> None:
    if not out.numel():
        return
    programs, rows = (1, len(data)) if add else (data.shape[:-1].numel(), 1)
    with on(data):
        _decode[(blocks.number, programs)](
            *(data, out, *blocks.on(data.device, bits), rows, blocks.count, data.shape[-1], blocks.number),
            bits=bits,
            width=BLOCK,
            enable_fp_fusion=False,
        )


def try_out(device: torch.device) -> None:
    """Raises where these kernels do not compile there, or give other bits than torch does."""
    x = torch.arange(-1000.0, 1001.0, dtype=torch.float32, device=device).div_(3).view(3, -1).contiguous()
    count = x.shape[1]
    x[1, ::7] = 0.0
    blocks = block_layout((300, count - 300)).between(0, count)
    for bits, add in itertools.product((1, 2, 4), (False, True)):
        data = encode_low(bits, x, blocks)
        ours, theirs = torch.empty_like(x[0] if add else x), torch.empty_like(x[0] if add else x)
        decode_low(bits, data, ours, blocks, add)
        torch_low_bit.decode_low(bits, data, theirs, blocks, add)
        if not (torch.equal(data, torch_low_bit.encode_low(bits, x, blocks)) and torch.equal(ours, theirs)):
            raise RuntimeError(f"Triton's kernels for {bits} bits do not answer as torch's on {device}")
