"""Accumulate and mark, scan, compact: the kernels for CUDA, in Triton.

    accumulate_and_mark   one pass: the sum, and of each block how many are above and their tail
    scan                  how many are above before each block
    compact               each block writes its indices to their places in a row of fixed length

No shape depends on the data and nothing is brought to the host, but for the one answer of `accumulate`. What
has no form here is torch's. Tested under Triton's interpreter only; `try_out` decides on a real device.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsieve.kernels import fast
from gradsieve.kernels.fast import above, apply, rebase, waiting, waiting_above

__all__ = ["above", "accumulate", "apply", "rebase", "select", "try_out", "waiting", "waiting_above"]

_BLOCK = 1024


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
    size: tl.constexpr,
):
    block = tl.program_id(0)
    place = block.to(tl.int64) * size + tl.arange(0, size)
    inside = place < n
    value = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    if add:
        value = tl.load(residual + place, mask=inside, other=0.0) * scale + value
        tl.store(out + place, value, mask=inside)
    magnitude = tl.abs(value)
    finite = magnitude <= 3.4028234663852886e38
    tl.store(spoiled + block, tl.sum((inside & (finite == 0)).to(tl.int32), 0))
    marks = inside & (magnitude >= threshold)
    tl.store(counts + block, tl.sum(marks.to(tl.int32), 0))
    tl.store(tails + block, tl.sum(tl.log(tl.where(marks, magnitude / threshold, 1.0)), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _scan(counts, starts, blocks, size: tl.constexpr):  # type: ignore[no-untyped-def]
    before = tl.zeros([1], dtype=tl.int64)
    for first in range(0, blocks, size):
        place = first + tl.arange(0, size)
        count = tl.load(counts + place, mask=place < blocks, other=0).to(tl.int64)
        tl.store(starts + place, before + tl.cumsum(count, 0) - count, mask=place < blocks)
        before += tl.sum(count, 0)
    tl.store(starts + blocks + tl.arange(0, 1), before)


@triton.jit  # type: ignore[untyped-decorator]
def _compact(x, starts, begin, indices, n, threshold, capacity, size: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    rank = tl.load(starts + block) - tl.load(begin)
    after = tl.load(starts + block + 1) - tl.load(begin)
    if (after > rank) & (after > 0) & (rank < capacity):  # most blocks of a sparse vector are not read again
        place = block.to(tl.int64) * size + tl.arange(0, size)
        magnitude = tl.abs(tl.load(x + place, mask=place < n, other=0.0))
        marks = (place < n) & (magnitude >= threshold)
        mine = rank + tl.cumsum(marks.to(tl.int64), 0) - 1
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
    blocks = _blocks(n)
    spoiled, counts = torch.empty((2, blocks), dtype=torch.int32, device=gradient.device)
    tails = torch.empty(blocks, dtype=torch.float32, device=gradient.device)
    found = (spoiled, counts, tails)
    with _on(gradient):
        _accumulate_and_mark[(blocks,)](
            *(residual, gradient, out, *found, n, scale, threshold),
            add=add,
            size=_BLOCK,
            enable_fp_fusion=False,  # the product is rounded before it is added, as in every form
        )
    return Marks(*found)


def scan(counts: Tensor) -> Tensor:
    """The sum of all counts before each, and at the end of all."""
    starts = torch.empty(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    with _on(counts):
        _scan[(1,)](counts, starts, counts.numel(), size=_BLOCK)
    return starts


def compact(x: Tensor, threshold: float, starts: Tensor, begin: Tensor, capacity: int) -> Tensor:
    """Indices of what is above the threshold, from the rank `begin` on; filled up with x.numel()."""
    indices = torch.full((capacity,), x.numel(), dtype=torch.int64, device=x.device)
    with _on(x):
        _compact[(_blocks(x.numel()),)](
            x, starts, begin, indices, x.numel(), threshold, capacity, size=_BLOCK
        )
    return indices


def accumulate(residual: Tensor, gradient: Tensor, scale: float, out: Tensor) -> bool:
    return not bool(accumulate_and_mark(residual, gradient, scale, out, math.inf).spoiled.any())


def select(x: Tensor, threshold: float, capacity: int, phase: float) -> tuple[Tensor, Tensor, Tensor]:
    marks = mark(x, threshold)
    starts = scan(marks.counts)
    demand = starts[-1]
    indices = compact(x, threshold, starts, fast.window_start(demand, capacity, phase), capacity)
    return indices, demand, fast.sendable(marks.tails.sum())


def try_out(device: torch.device) -> None:
    """Raise where these kernels do not compile there, or do not answer as torch does."""
    x = torch.arange(-2.0 * _BLOCK, _BLOCK + 1, dtype=torch.float32, device=device)
    ours, theirs = torch.empty_like(x), torch.empty_like(x)
    same = accumulate(x, x, 0.5, ours) == fast.accumulate(x, x, 0.5, theirs) and torch.equal(ours, theirs)
    indices, demand, _ = select(x, 700.0, 900, 0.5)
    wanted, all_of_them, _ = fast.select(x, 700.0, 900, 0.5)
    if not (same and torch.equal(indices, wanted) and torch.equal(demand, all_of_them)):
        raise RuntimeError(f"Triton's kernels do not answer as torch's on {device}")


def _blocks(n: int) -> int:
    return max(1, -(-n // _BLOCK))


def _on(x: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device, which need not be that of x."""
    return torch.cuda.device_of(x)  # type: ignore[no-untyped-call]
