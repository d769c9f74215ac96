"""The kernels that pass over whole models, compiled for this CPU by numba.

For contiguous float32 vectors of one length on the CPU; `choice.py` sees to that, since nothing here checks a
bound. Every kernel releases the GIL: backward runs in one thread while another one exchanges.

Kernels are given with their signatures, so that numba compiles them when they are loaded and not in some
later step. Where a loop has to be vectorised, indices are `uint64`: a signed one is tested for its sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import float32, int32, njit, types, uint32, uint64
from numba.extending import intrinsic, register_jitable
from torch import Tensor

from gradsieve.kernels import fast
from gradsieve.kernels.pointers import INFINITE, bits_of, floats_at, integers_at

_LARGEST = torch.finfo(torch.float32).max
_LANES = 16
"""float32 in the 64 bytes that memory is written by."""
_VECTOR = ir.VectorType(ir.FloatType(), _LANES)
_BLOCK = 64
"""Elements of which it is asked at once whether any is above the threshold."""
_STREAMED = 1 << 21
"""Elements from which on a result is written past the cache: a shorter one is still there when it is read."""
_PAGE = 1024
"""float32 in a page of memory."""
_EXPECTED = 256
"""Of so many elements one is expected above the threshold; buffers grow where it is more."""


def _sums(builder: Any, residual: Any, gradient: Any, scale: Any) -> tuple[Any, Any]:
    value = builder.fadd(builder.fmul(scale, residual), gradient)
    return value, _not_finite(builder, value)


def _not_finite(builder: Any, value: Any) -> Any:
    """Marks where every bit of the exponent is set."""
    bits = ir.VectorType(ir.IntType(32), _LANES)
    exponent = ir.Constant(bits, [0x7F800000] * _LANES)
    return builder.icmp_unsigned("==", builder.and_(builder.bitcast(value, bits), exponent), exponent)


def _type_lanes(formula: Callable[..., Any], streamed: bool) -> Callable[..., Any]:
    """out[place : place + 16] = formula of the same elements of a, b and c; returns 0 where none is spoiled.

    Memory is read before a part of a cache line is written. A non-temporal store of a whole line spares that:
    a quarter of all traffic of `accumulate`. numba has none, so these are written in LLVM's language.
    """

    def typed(_: Any, a: Any, b: Any, c: Any, out: Any, place: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def pointer(which: int) -> Any:
                array = context.make_array(signature.args[which])(context, builder, arguments[which])
                return builder.bitcast(builder.gep(array.data, [arguments[4]]), _VECTOR.as_pointer())

            def lanes(which: int) -> Any:
                if isinstance(signature.args[which], types.Array):
                    return builder.load(pointer(which), align=4)
                empty, first = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(ir.IntType(32), 0)
                alone = builder.insert_element(empty, arguments[which], first)
                everywhere = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
                return builder.shuffle_vector(alone, empty, everywhere)

            value, spoiled = formula(builder, lanes(0), lanes(1), lanes(2))
            store = builder.store(value, pointer(3), align=4 * _LANES)
            if streamed:
                one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
                store.set_metadata("nontemporal", one)
            return builder.zext(builder.bitcast(spoiled, ir.IntType(_LANES)), ir.IntType(64))

        return types.int64(a, b, c, out, place), generate

    return typed


def _type_fence(_: Any) -> Any:
    """What was written past the cache is seen by every thread that runs after this one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_sum_past_the_cache: Any = intrinsic(_type_lanes(_sums, streamed=True))
_sum_into_the_cache: Any = intrinsic(_type_lanes(_sums, streamed=False))
_fence: Any = intrinsic(_type_fence)


@register_jitable
def _finite(value: Any) -> Any:
    return abs(value) <= float32(_LARGEST)


@register_jitable
def _either(flag: Any, condition: Any) -> Any:
    """As wide as an element, or the loop works on half as many at once."""
    return int32(flag | int32(condition))


@register_jitable
def _wait(anchor: Any, own: Any, i: Any) -> Any:
    """The residual at i."""
    moved = anchor[i] - own[i]
    return moved if _finite(moved) else float32(0)


def _accumulate(n: Any, residual: Any, gradient: Any, scale: Any, out: Any, ahead: Any, streamed: Any) -> Any:
    residual, gradient, out = floats_at(residual, n), floats_at(gradient, n), floats_at(out, n)
    whole = ahead + (n - ahead) // _LANES * _LANES
    spoiled = 0
    for place in range(ahead, whole, _LANES):
        if streamed:
            spoiled |= _sum_past_the_cache(residual, gradient, scale, out, place)
        else:
            spoiled |= _sum_into_the_cache(residual, gradient, scale, out, place)
    for begin, end in ((0, ahead), (whole, n)):
        for i in range(begin, end):
            out[i] = scale * residual[i] + gradient[i]
            spoiled |= not _finite(out[i])
    _fence()
    return spoiled == 0


def _waiting(n: Any, anchor: Any, own: Any, out: Any) -> None:
    anchor, own, out = floats_at(anchor, n), floats_at(own, n), floats_at(out, n)
    for i in range(n):
        out[i] = _wait(anchor, own, i)


def _rebase(n: Any, shared: Any, own: Any, anchor: Any, preview: Any) -> None:
    shared, own, anchor = floats_at(shared, n), floats_at(own, n), floats_at(anchor, n)
    for i in range(n):
        waits = _wait(anchor, own, i)
        own[i] = shared[i] - preview * waits
        anchor[i] = own[i] + waits


@register_jitable
def _left(anchor: Any, own: Any, spent: Any, i: Any) -> Any:
    """The residual at i after this was spent."""
    left = (anchor[i] - own[i]) - spent[i]
    return left if _finite(left) else float32(0)


def _apply(n: Any, shared: Any, own: Any, anchor: Any, update: Any, spent: Any, world: Any) -> None:
    shared, own, anchor = floats_at(shared, n), floats_at(own, n), floats_at(anchor, n)
    update, spent = floats_at(update, n), floats_at(spent, n)
    for i in range(n):
        anchor[i] = own[i] + _left(anchor, own, spent, i)
        shared[i] -= update[i] / world


def _apply_and_rebase(
    n: Any, shared: Any, own: Any, anchor: Any, update: Any, spent: Any, world: Any, preview: Any
) -> None:
    shared, own, anchor = floats_at(shared, n), floats_at(own, n), floats_at(anchor, n)
    update, spent = floats_at(update, n), floats_at(spent, n)
    for i in range(n):
        anchor[i] = own[i] + _left(anchor, own, spent, i)
        waits = _wait(anchor, own, i)
        shared[i] -= update[i] / world
        own[i] = shared[i] - preview * waits
        anchor[i] = own[i] + waits


@register_jitable
def _magnitude(x: Any, i: Any) -> Any:
    """As bits, whose order is that of the magnitudes, with infinity and every NaN above all numbers."""
    return bits_of(x[i]) & uint32(0x7FFFFFFF)


@register_jitable
def _larger(x: Any, i: Any, apart: Any) -> Any:
    return max(_magnitude(x, i), _magnitude(x, i + apart))


def _is_finite(n: Any, x: Any) -> Any:
    """Eight pages side by side: a processor fetches ahead within a page, and one page is not enough."""
    x = floats_at(x, n)
    one, two, four = uint64(_PAGE), uint64(2 * _PAGE), uint64(4 * _PAGE)
    whole = n // (8 * _PAGE) * (8 * _PAGE)
    most = uint32(0)
    for begin in range(0, whole, 8 * _PAGE):
        for j in range(_PAGE):
            i = uint64(begin + j)
            low = max(_larger(x, i, one), _larger(x, i + two, one))
            high = max(_larger(x, i + four, one), _larger(x, i + four + two, one))
            most = max(most, max(low, high))
    for rest in range(whole, n):
        most = max(most, _magnitude(x, uint64(rest)))
    return most < uint32(INFINITE)


@register_jitable
def _list_above(x: Any, threshold: Any, begin: Any, end: Any, found: Any, count: Any) -> Any:
    for i in range(begin, end):
        found[count] = i
        count += abs(x[i]) >= threshold
    return count


def _above(n: Any, x: Any, threshold: Any, begin: Any, buffer: Any, found: Any, count: Any) -> Any:
    """Go on from `begin` until x ends or the buffer is full; how far that was, and the count."""
    x, found = floats_at(x, n), integers_at(found, buffer)
    whole = begin + (n - begin) // _BLOCK * _BLOCK
    for place in range(begin, whole, _BLOCK):
        if count + 2 * _BLOCK > buffer:
            return place, count
        any_above = int32(0)
        for j in range(_BLOCK):
            any_above = _either(any_above, abs(x[uint64(place + j)]) >= threshold)
        if any_above:
            count = _list_above(x, threshold, place, place + _BLOCK, found, count)
    return n, _list_above(x, threshold, whole, n, found, count)


@register_jitable
def _list_waiting(
    anchor: Any, own: Any, threshold: Any, begin: Any, end: Any, found: Any, values: Any, count: Any
) -> Any:
    for i in range(begin, end):
        waits = _wait(anchor, own, i)
        found[count], values[count] = i, waits
        count += abs(waits) >= threshold
    return count


def _waiting_above(
    n: Any,
    anchor: Any,
    own: Any,
    threshold: Any,
    begin: Any,
    buffer: Any,
    found: Any,
    values: Any,
    count: Any,
) -> Any:
    """As `_above`."""
    anchor, own = floats_at(anchor, n), floats_at(own, n)
    found, values = integers_at(found, buffer), floats_at(values, buffer)
    whole = begin + (n - begin) // _BLOCK * _BLOCK
    for place in range(begin, whole, _BLOCK):
        if count + 2 * _BLOCK > buffer:
            return place, count
        any_above = int32(0)
        for j in range(_BLOCK):
            any_above = _either(any_above, abs(_wait(anchor, own, uint64(place + j))) >= threshold)
        if any_above:
            count = _list_waiting(anchor, own, threshold, place, place + _BLOCK, found, values, count)
    return n, _list_waiting(anchor, own, threshold, whole, n, found, values, count)


_KERNELS: dict[str, tuple[Callable[..., Any], str]] = {
    "accumulate": (_accumulate, "boolean(int64, int64, int64, float32, int64, int64, boolean)"),
    "waiting": (_waiting, "void(int64, int64, int64, int64)"),
    "rebase": (_rebase, "void(int64, int64, int64, int64, float32)"),
    "apply": (_apply, "void(int64, int64, int64, int64, int64, int64, float32)"),
    "apply_and_rebase": (
        _apply_and_rebase,
        "void(int64, int64, int64, int64, int64, int64, float32, float32)",
    ),
    "is_finite": (_is_finite, "boolean(int64, int64)"),
    "above": (_above, "UniTuple(int64, 2)(int64, int64, float32, int64, int64, int64, int64)"),
    "waiting_above": (
        _waiting_above,
        "UniTuple(int64, 2)(int64, int64, int64, float32, int64, int64, int64, int64, int64)",
    ),
}


class Compiled:
    """All kernels, compiled; machine code is kept on disk where `cache` is set."""

    def __init__(self, cache: bool) -> None:
        self._run = {
            name: njit(signature, nogil=True, cache=cache)(kernel)
            for name, (kernel, signature) in _KERNELS.items()
        }

    def accumulate(self, residual: Tensor, gradient: Tensor, scale: float, out: Tensor) -> bool:
        sources = residual.data_ptr(), gradient.data_ptr(), scale
        way_out = _way_out(out, residual, gradient)
        return bool(self._run["accumulate"](out.numel(), *sources, out.data_ptr(), *way_out))

    def waiting(self, anchor: Tensor, own: Tensor, out: Tensor) -> None:
        self._run["waiting"](out.numel(), anchor.data_ptr(), own.data_ptr(), out.data_ptr())

    def rebase(self, shared: Tensor, own: Tensor, anchor: Tensor, preview: float) -> None:
        self._run["rebase"](shared.numel(), shared.data_ptr(), own.data_ptr(), anchor.data_ptr(), preview)

    def apply(
        self,
        shared: Tensor,
        own: Tensor,
        anchor: Tensor,
        update: Tensor,
        spent: Tensor,
        world: int,
        preview: float | None,
    ) -> None:
        where = (each.data_ptr() for each in (shared, own, anchor, update, spent))
        if preview is None:
            self._run["apply"](shared.numel(), *where, world)
        else:
            self._run["apply_and_rebase"](shared.numel(), *where, world, preview)

    def is_finite(self, x: Tensor) -> bool:
        return bool(self._run["is_finite"](x.numel(), x.data_ptr()))

    def above(self, x: Tensor, threshold: float) -> Tensor:
        n, find = x.numel(), self._run["above"]
        place = count = 0
        found = torch.empty(_buffer(n), dtype=torch.int64, device=x.device)
        while True:
            buffer = found.numel(), found.data_ptr()
            place, count = find(n, x.data_ptr(), threshold, place, *buffer, count)
            if place == n:
                return found[:count].clone()
            found = _doubled(found)

    def waiting_above(self, anchor: Tensor, own: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
        n, find = anchor.numel(), self._run["waiting_above"]
        sources = anchor.data_ptr(), own.data_ptr(), threshold
        place = count = 0
        found = torch.empty(_buffer(n), dtype=torch.int64, device=anchor.device)
        values = torch.empty(_buffer(n), dtype=torch.float32, device=anchor.device)
        while True:
            buffer = found.numel(), found.data_ptr(), values.data_ptr()
            place, count = find(n, *sources, place, *buffer, count)
            if place == n:
                return found[:count].clone(), values[:count].clone()
            found, values = _doubled(found), _doubled(values)

    def select(
        self, x: Tensor, threshold: float, capacity: int, phase: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = self.above(x, threshold)
        return fast.window(found, x[found], x.numel(), threshold, capacity, phase)


def _way_out(out: Tensor, *inputs: Tensor) -> tuple[int, bool]:
    """Elements ahead of the first whole cache line, and whether to write past the cache.

    Not where `out` is one of the inputs: it is in the cache when it is written.
    """
    ahead = min(-(out.data_ptr() // 4) % _LANES, out.numel())
    in_place = any(out.data_ptr() == each.data_ptr() for each in inputs)
    return ahead, not in_place and out.numel() >= _STREAMED


def _buffer(n: int) -> int:
    return n // _EXPECTED + 2 * _BLOCK


def _doubled(full: Tensor) -> Tensor:
    return torch.cat([full, torch.empty_like(full)])
