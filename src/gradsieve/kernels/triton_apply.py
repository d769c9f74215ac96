"""Apply, rebase and the residual, for CUDA in Triton: each a single pass over memory.

Bytes an element, in float32: 32 for `apply` with a preview, 28 without, 20 for `rebase`, 12 for `waiting`.
`own` may be bfloat16 or float16: it is read as float32 and rounded when it is written. Divisions are the
correctly rounded ones, and no product is fused with a sum. Tested under Triton's interpreter only.

A program has a block of elements. Whole blocks are read and written without a mask, so that accesses are wide
for every n wherever all vectors are aligned. That is all that machine code depends on besides types: left to
itself, Triton compiles anew for every mixture of alignments, and for lengths.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["apply", "rebase", "waiting"]

BLOCK = 1024
"""Elements of a program."""
WARPS = 4 if torch.version.hip else 8
"""Four elements a thread: with more, float32 and narrower types would be dealt to threads differently, and
travel through shared memory to meet."""


@triton.jit
def _finite_or_zero(x):  # type: ignore[no-untyped-def]
    return tl.where(tl.abs(x) <= 3.4028234663852886e38, x, 0.0)


@triton.jit
def wide(x):  # type: ignore[no-untyped-def]
    """As float32. bfloat16 is handled by its bits, here and below: Triton's interpreter has other denormals
    and cuts instead of rounding, and what is tested has to be what runs."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def bits_of_bfloat16(x):  # type: ignore[no-untyped-def]
    """The nearest, ties to even; one NaN for all."""
    word = x.to(tl.uint32, bitcast=True)
    nearest = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    return tl.where((word & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, nearest)


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """To nearest, ties to even."""
    if dtype == tl.bfloat16:
        x = bits_of_bfloat16(x).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def at(vector, place, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to elements from a multiple of four on; aligned where the vector is, to 16 bytes."""
    there = vector + place
    if aligned:
        there = tl.multiple_of(there, 16)
    return there


@triton.jit
def _write_rebased(own, anchor, inside, w, x, m, preview):  # type: ignore[no-untyped-def]
    """`own` and the anchor that follows it, from the shared model w, `own` x and the anchor m."""
    waits = _finite_or_zero(m - x)
    x = _rounded(w - preview * waits, own.dtype.element_ty)
    tl.store(own, x, mask=inside)
    tl.store(anchor, wide(x) + waits, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _apply_at(  # type: ignore[no-untyped-def]
    place,
    inside,
    shared,
    own,
    anchor,
    update,
    spent,
    world,
    preview,
    rebased: tl.constexpr,
    aligned: tl.constexpr,
):
    shared, own, anchor = at(shared, place, aligned), at(own, place, aligned), at(anchor, place, aligned)
    x = wide(tl.load(own, mask=inside))
    left = (tl.load(anchor, mask=inside) - x) - tl.load(at(spent, place, aligned), mask=inside)
    m = x + _finite_or_zero(left)
    mean = tl.div_rn(tl.load(at(update, place, aligned), mask=inside), world)
    w = tl.load(shared, mask=inside) - mean
    tl.store(shared, w, mask=inside)
    if rebased:
        _write_rebased(own, anchor, inside, w, x, m, preview)
    else:
        tl.store(anchor, m, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rebase_at(place, inside, shared, own, anchor, preview, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    shared, own, anchor = at(shared, place, aligned), at(own, place, aligned), at(anchor, place, aligned)
    w, x, m = tl.load(shared, mask=inside), wide(tl.load(own, mask=inside)), tl.load(anchor, mask=inside)
    _write_rebased(own, anchor, inside, w, x, m, preview)


@triton.jit  # type: ignore[untyped-decorator]
def _waiting_at(place, inside, anchor, own, out, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    anchor, own, out = at(anchor, place, aligned), at(own, place, aligned), at(out, place, aligned)
    waits = tl.load(anchor, mask=inside) - wide(tl.load(own, mask=inside))
    tl.store(out, _rounded(_finite_or_zero(waits), out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["shared", "own", "anchor", "update", "spent", "n"])  # type: ignore[untyped-decorator]
def _apply(  # type: ignore[no-untyped-def]
    shared,
    own,
    anchor,
    update,
    spent,
    n,
    world,
    preview,
    rebased: tl.constexpr,
    aligned: tl.constexpr,
    size: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * size
    place = first + tl.arange(0, size)
    if first + size <= n:
        _apply_at(place, None, shared, own, anchor, update, spent, world, preview, rebased, aligned)
    else:
        _apply_at(place, place < n, shared, own, anchor, update, spent, world, preview, rebased, aligned)


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


def waiting(anchor: Tensor, own: Tensor, out: Tensor) -> None:
    vectors, n = (anchor, own.detach(), out), anchor.numel()
    with on(anchor):
        _waiting[(blocks_of(n),)](*vectors, n, **launched(*vectors))


def rebase(shared: Tensor, own: Tensor, anchor: Tensor, preview: float) -> None:
    vectors, n = (shared, own.detach(), anchor), shared.numel()
    with on(shared):
        _rebase[(blocks_of(n),)](*vectors, n, float(preview), **launched(*vectors))


def apply(
    shared: Tensor,
    own: Tensor,
    anchor: Tensor,
    update: Tensor,
    spent: Tensor,
    world: int,
    preview: float | None,
) -> None:
    vectors, n = (shared, own.detach(), anchor, update, spent), shared.numel()
    with on(shared):
        _apply[(blocks_of(n),)](
            *(*vectors, n, float(world), float(preview or 0.0)),
            rebased=preview is not None,
            **launched(*vectors),
        )


def launched(*vectors: Tensor) -> dict[str, Any]:
    """How kernels over whole vectors are: `enable_fp_fusion` would round a product and a sum only once."""
    aligned = all(x.data_ptr() % 16 == 0 for x in vectors)
    return {"aligned": aligned, "size": BLOCK, "num_warps": WARPS, "enable_fp_fusion": False}


def blocks_of(n: int) -> int:
    return max(1, -(-n // BLOCK))


def on(x: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device, which need not be that of x."""
    return torch.cuda.device_of(x)  # type: ignore[no-untyped-call]
