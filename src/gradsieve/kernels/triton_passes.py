"""Apply, rebase and the residual, for CUDA in Triton: each a single pass over memory.

Bytes an element, in float32: 28 for `apply`, 20 for `rebase`, 12 for `residual`. `own` may be bfloat16 or
float16: it is read as float32 and rounded when it is written. Divisions are the correctly rounded ones, and
no product is fused with a sum. Tested under Triton's interpreter only; `try_out` decides on a real device.

A program has a block of elements. Whole blocks are read and written without a mask, so that accesses are wide
for every n wherever all vectors are aligned. That is all that machine code depends on besides types: left to
itself, Triton compiles anew for every mixture of alignments, and for lengths.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsieve.kernels import torch_passes
from gradsieve.kernels.torch_passes import above, accumulate, is_finite, residual_above  # torch's do

__all__ = ["above", "accumulate", "apply", "is_finite", "rebase", "residual", "residual_above", "try_out"]

BLOCK = 1024  # elements of a program
# Four elements a thread: with more, float32 and narrower types would be dealt to threads differently, and
# travel through shared memory to meet.
WARPS = 4 if torch.version.hip else 8


@triton.jit
def _finite_or_zero(x):  # type: ignore[no-untyped-def]
    return tl.where(tl.abs(x) <= 3.4028234663852886e38, x, 0.0)


@triton.jit
def wide(x):  # type: ignore[no-untyped-def]
    """Widens to float32. bfloat16 is handled by its bits, here and below: Triton's interpreter has other
    denormals and cuts instead of rounding, and what is tested has to be what runs."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def bits_of_bfloat16(x):  # type: ignore[no-untyped-def]
    """Rounds to the nearest, ties to even; one NaN stands for all."""
    word = x.to(tl.uint32, bitcast=True)
    nearest = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    return tl.where((word & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, nearest)


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounds to the nearest, ties to even."""
    if dtype == tl.bfloat16:
        x = bits_of_bfloat16(x).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def at(vector, place, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns pointers to elements from a multiple of four on; aligned to 16 bytes if the vector is."""
    there = vector + place
    if aligned:
        there = tl.multiple_of(there, 16)
    return there


@triton.jit  # type: ignore[untyped-decorator]
def _apply_at(place, inside, shared, own, anchor, update, spent, world, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    shared, own, anchor = at(shared, place, aligned), at(own, place, aligned), at(anchor, place, aligned)
    x = wide(tl.load(own, mask=inside))
    left = (tl.load(anchor, mask=inside) - x) - tl.load(at(spent, place, aligned), mask=inside)
    mean = tl.div_rn(tl.load(at(update, place, aligned), mask=inside), world)
    tl.store(shared, tl.load(shared, mask=inside) - mean, mask=inside)
    tl.store(anchor, x + _finite_or_zero(left), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rebase_at(place, inside, shared, own, anchor, preview, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    shared, own, anchor = at(shared, place, aligned), at(own, place, aligned), at(anchor, place, aligned)
    residual = _finite_or_zero(tl.load(anchor, mask=inside) - wide(tl.load(own, mask=inside)))
    x = _rounded(tl.load(shared, mask=inside) - preview * residual, own.dtype.element_ty)
    tl.store(own, x, mask=inside)
    tl.store(anchor, wide(x) + residual, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _waiting_at(place, inside, anchor, own, out, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    anchor, own, out = at(anchor, place, aligned), at(own, place, aligned), at(out, place, aligned)
    waits = tl.load(anchor, mask=inside) - wide(tl.load(own, mask=inside))
    tl.store(out, _rounded(_finite_or_zero(waits), out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["shared", "own", "anchor", "update", "spent", "n"])  # type: ignore[untyped-decorator]
def _apply(shared, own, anchor, update, spent, n, world, aligned: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * size
    place = first + tl.arange(0, size)
    if first + size <= n:
        _apply_at(place, None, shared, own, anchor, update, spent, world, aligned)
    else:
        _apply_at(place, place < n, shared, own, anchor, update, spent, world, aligned)


@triton.jit(do_not_specialize=["shared", "own", "anchor", "n"])  # type: ignore[untyped-decorator]
def _rebase(shared, own, anchor, n, preview, aligned: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * size
    place = first + tl.arange(0, size)
    if first + size <= n:
        _rebase_at(place, None, shared, own, anchor, preview, aligned)
    else:
        _rebase_at(place, place < n, shared, own, anchor, preview, aligned)


@triton.jit(do_not_specialize=["anchor", "own", "out", "n"])  # type: ignore[untyped-decorator]
def _waiting(anchor, own, out, n, aligned: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * size
    place = first + tl.arange(0, size)
    if first + size <= n:
        _waiting_at(place, None, anchor, own, out, aligned)
    else:
        _waiting_at(place, place < n, anchor, own, out, aligned)


def residual(anchor: Tensor, own: Tensor, out: Tensor) -> None:
    vectors, n = (anchor, own.detach(), out), anchor.numel()
    with on(anchor):
        _waiting[(blocks_of(n),)](*vectors, n, **launched(*vectors))


def rebase(shared: Tensor, own: Tensor, anchor: Tensor, preview: float) -> None:
    vectors, n = (shared, own.detach(), anchor), shared.numel()
    with on(shared):
        _rebase[(blocks_of(n),)](*vectors, n, float(preview), **launched(*vectors))


def apply(shared: Tensor, own: Tensor, anchor: Tensor, update: Tensor, spent: Tensor, world: int) -> None:
    vectors, n = (shared, own.detach(), anchor, update, spent), shared.numel()
    with on(shared):
        _apply[(blocks_of(n),)](*vectors, n, float(world), **launched(*vectors))


def launched(*vectors: Tensor) -> dict[str, Any]:
    """Returns the settings of a launch: `enable_fp_fusion` would round a product and a sum only once."""
    aligned = all(x.data_ptr() % 16 == 0 for x in vectors)
    return {"aligned": aligned, "size": BLOCK, "num_warps": WARPS, "enable_fp_fusion": False}


def blocks_of(n: int) -> int:
    return max(1, -(-n // BLOCK))


def on(x: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device, which need not be that of x."""
    return torch.cuda.device_of(x)  # type: ignore[no-untyped-call]


def try_out(device: torch.device) -> None:
    """Raises where these kernels do not compile there, or do not leave what torch's do."""
    x = torch.arange(-2.0 * BLOCK, BLOCK + 1, dtype=torch.float32, device=device).div_(7)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        models = []
        for form in (sys.modules[__name__], torch_passes):
            shared, own, anchor, out = x.clone(), (0.9 * x).to(dtype), 1.1 * x, torch.empty_like(x)
            form.apply(shared, own, anchor, x, 0.3 * x, 3)
            form.rebase(shared, own, anchor, 0.7)
            form.residual(anchor, own, out)
            models.append((shared, own, anchor, out))
        if not all(map(torch.equal, *models)):
            raise RuntimeError(f"Triton's kernels do not answer as torch's on {device}")
