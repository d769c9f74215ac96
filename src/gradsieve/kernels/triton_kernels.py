"""Accumulate and mark, scan, compact: the kernels for CUDA, in Triton.

    accumulate_and_mark   one pass: the sum, and of each block how many are above and their tail
    scan                  how many are above before each block: within groups of blocks, then over groups
    compact               each block writes its indices to their places in a row of fixed length

No shape depends on the data and nothing is brought to the host, but for the one answer of `accumulate`. Apply
and rebase are in `triton_apply.py`; what has no form here is torch's. Tested under Triton's
interpreter only; `try_out` decides on a real device.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsieve.kernels import fast
from gradsieve.kernels.fast import above
from gradsieve.kernels.triton_apply import BLOCK, apply, at, blocks_of, launched, on, rebase, waiting, wide

__all__ = ["above", "accumulate", "apply", "rebase", "select", "try_out", "waiting", "waiting_above"]


@dataclass(frozen=True, slots=True)
class Marks:
    """What each block of elements found."""

    spoiled: Tensor
    """Elements that are not finite."""
    counts: Tensor
    """Elements with |x| >= threshold."""
    tails: Tensor
    """Sum of ln(|x| / threshold) over them."""


@triton.jit  # type: ignore[untyped-decorator]
def _sum_at(residual, gradient, out, inside, scale, add: tl.constexpr):  # type: ignore[no-untyped-def]
    value = wide(tl.load(gradient, mask=inside))
    if add:
        value = tl.load(residual, mask=inside) * scale + value
        tl.store(out, value, mask=inside)
    return value


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["residual", "gradient", "out", "spoiled", "counts", "tails", "n"]
)
def _accumulate_and_mark(  # type: ignore[no-untyped-def]
    residual,
    gradient,
    out,
    spoiled,
    counts,
    tails,
    n,
    scale,
    threshold,
    add: tl.constexpr,
    aligned: tl.constexpr,
    size: tl.constexpr,
):
    block = tl.program_id(0)
    first = block.to(tl.int64) * size
    place = first + tl.arange(0, size)
    residual, gradient, out = (
        at(residual, place, aligned),
        at(gradient, place, aligned),
        at(out, place, aligned),
    )
    inside = place < n
    if first + size <= n:
        value = _sum_at(residual, gradient, out, None, scale, add)
    else:
        value = _sum_at(residual, gradient, out, inside, scale, add)
    magnitude = tl.abs(value)
    bad = inside & ((magnitude <= 3.4028234663852886e38) == 0)
    marks = inside & (magnitude >= threshold)
    both = tl.sum((bad.to(tl.int32) << 16) | marks.to(tl.int32), 0)  # neither is more than a block
    tl.store(spoiled + block, both >> 16)
    tl.store(counts + block, both & 0xFFFF)
    tl.store(tails + block, tl.sum(tl.log(tl.where(marks, magnitude / threshold, 1.0)), 0))


@triton.jit(do_not_specialize=["counts", "starts", "totals", "blocks"])  # type: ignore[untyped-decorator]
def _scan_groups(counts, starts, totals, blocks, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Within each group of blocks, and the sum of the group."""
    group = tl.program_id(0)
    place = group * size + tl.arange(0, size)
    count = tl.load(counts + place, mask=place < blocks, other=0).to(tl.int64)
    until = tl.cumsum(count, 0)
    tl.store(starts + place, until - count, mask=place <= blocks)
    tl.store(totals + group, tl.sum(count, 0))


@triton.jit(do_not_specialize=["starts", "totals", "blocks"])  # type: ignore[untyped-decorator]
def _add_groups_before(starts, totals, blocks, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """To all groups but the first. Each program adds up what is before its own: none waits for another."""
    group = tl.program_id(0) + 1
    i = tl.arange(0, size)
    before = tl.zeros([size], dtype=tl.int64)
    for first in range(0, group, size):
        before += tl.load(totals + first + i, mask=first + i < group, other=0)
    place = group * size + i
    start = tl.load(starts + place, mask=place <= blocks, other=0)
    tl.store(starts + place, start + tl.sum(before, 0), mask=place <= blocks)


@triton.jit(do_not_specialize=["x", "starts", "begin", "indices", "n", "capacity"])  # type: ignore[untyped-decorator]
def _compact(x, starts, begin, indices, n, threshold, capacity, size: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    rank = tl.load(starts + block) - tl.load(begin)
    after = tl.load(starts + block + 1) - tl.load(begin)
    if (after > rank) & (after > 0) & (rank < capacity):  # most blocks of a sparse vector are not read again
        place = block.to(tl.int64) * size + tl.arange(0, size)
        value = tl.load(x + place, mask=place < n)
        marks = (place < n) & (tl.abs(value) >= threshold)
        mine = rank + tl.cumsum(marks.to(tl.int32), 0) - 1
        tl.store(indices + mine, place, mask=marks & (mine >= 0) & (mine < capacity))


def accumulate_and_mark(
    residual: Tensor, gradient: Tensor, scale: float, out: Tensor, threshold: float
) -> Marks:
    """out = scale * residual + gradient, and what is above the threshold there."""
    return _marks(residual, gradient, out, scale, threshold, add=True)


def mark(x: Tensor, threshold: float) -> Marks:
    """What is above the threshold in x."""
    return _marks(x, x, x, 1.0, threshold, add=False)


def _marks(
    residual: Tensor, gradient: Tensor, out: Tensor, scale: float, threshold: float, add: bool
) -> Marks:
    n = gradient.numel()
    blocks = blocks_of(n)
    spoiled, counts = torch.empty((2, blocks), dtype=torch.int32, device=gradient.device)
    tails = torch.empty(blocks, dtype=torch.float32, device=gradient.device)
    found = (spoiled, counts, tails)
    with on(gradient):
        _accumulate_and_mark[(blocks,)](
            *(residual, gradient, out, *found, n, float(scale), float(threshold)),
            add=add,
            **launched(residual, gradient, out),
        )
    return Marks(*found)


def scan(counts: Tensor) -> Tensor:
    """The sum of all counts before each, and at the end of all."""
    blocks = counts.numel()
    groups = blocks_of(blocks + 1)
    starts = torch.empty(blocks + 1, dtype=torch.int64, device=counts.device)
    totals = torch.empty(groups, dtype=torch.int64, device=counts.device)
    with on(counts):
        _scan_groups[(groups,)](counts, starts, totals, blocks, size=BLOCK, enable_fp_fusion=False)
        if groups > 1:
            _add_groups_before[(groups - 1,)](starts, totals, blocks, size=BLOCK, enable_fp_fusion=False)
    return starts


def compact(x: Tensor, threshold: float, starts: Tensor, begin: Tensor, capacity: int) -> Tensor:
    """Indices of what is above the threshold, from the rank `begin` on; filled up with x.numel()."""
    indices = torch.full((capacity,), x.numel(), dtype=torch.int64, device=x.device)
    with on(x):
        _compact[(blocks_of(x.numel()),)](
            *(x, starts, begin, indices, x.numel(), float(threshold), capacity),
            size=BLOCK,
            enable_fp_fusion=False,
        )
    return indices


def accumulate(residual: Tensor, gradient: Tensor, scale: float, out: Tensor) -> bool:
    return not bool(accumulate_and_mark(residual, gradient, scale, out, math.inf).spoiled.any())


def waiting_above(anchor: Tensor, own: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    waits = torch.empty_like(anchor)
    waiting(anchor, own, waits)
    found = above(waits, threshold)
    return found, waits[found]


def select(x: Tensor, threshold: float, capacity: int, phase: float) -> tuple[Tensor, Tensor, Tensor]:
    marks = mark(x, threshold)
    starts = scan(marks.counts)
    demand = starts[-1]
    indices = compact(x, threshold, starts, fast.window_start(demand, capacity, phase), capacity)
    return indices, demand, fast.sendable(marks.tails.sum())


def try_out(device: torch.device) -> None:
    """Raise where these kernels do not compile there, or do not answer as torch does."""
    x = torch.arange(-2.0 * BLOCK, BLOCK + 1, dtype=torch.float32, device=device)
    ours, theirs = torch.empty_like(x), torch.empty_like(x)
    same = accumulate(x, x, 0.5, ours) == fast.accumulate(x, x, 0.5, theirs) and torch.equal(ours, theirs)
    indices, demand, _ = select(x, 700.0, 900, 0.5)
    wanted, all_of_them, _ = fast.select(x, 700.0, 900, 0.5)
    same = same and torch.equal(indices, wanted) and torch.equal(demand, all_of_them)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        same = same and _moves_alike(x.div(7), dtype)
    if not same:
        raise RuntimeError(f"Triton's kernels do not answer as torch's on {device}")


def _moves_alike(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether apply, rebase and waiting leave what torch's do, in parameters of this type."""
    models = []
    for each in (sys.modules[__name__], fast):
        shared, own, anchor, out = x.clone(), (0.9 * x).to(dtype), 1.1 * x, torch.empty_like(x)
        each.apply(shared, own, anchor, x, 0.3 * x, 3, 0.4)
        each.apply(shared, own, anchor, x, 0.2 * x, 3, None)
        each.rebase(shared, own, anchor, 0.7)
        each.waiting(anchor, own, out)
        models.append((shared, own, anchor, out))
    return all(map(torch.equal, *models))
