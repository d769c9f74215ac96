"""Sums at places that all ranks know: exact, or in few bits with who rounds keeping the error.

    exact    one all-reduce
    others   the vector is dealt out in rows, one an owner. Every rank rounds its values and sends each owner
             its row; the owner adds up what arrives, in rank order, rounds the sum and sends it to everybody.

A rank gave what its rounded values say; the owner of a row gave, in addition, what rounding its sum added.
Owners change from step to step, so that no rank keeps more of the rounding than another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from gradsieve.comm.ops import AllGather, AllReduce, AllToAll
from gradsieve.kernels.blocks import Layout
from gradsieve.schemes.base import Scheme
from gradsieve.types import Ctx, Program, State, Stream, Vector, gathered
from gradsieve.wire.values import VALUE_CODECS, EncodedVector, RoundedSum, RowLayout, row_layout_over

Values: TypeAlias = Literal["exact", "bf16", "int8", "int4", "int2", "sign"]


@dataclass(frozen=True, kw_only=True)
class Agreed(Scheme[State]):
    """In an agreed scheme all ranks know the places before any value travels."""

    # How values travel. Who rounds keeps the rounding error, so that nothing is lost.
    values: Values = "exact"


def sum_agreed(mine: Tensor, values: Values, ctx: Ctx) -> Program[tuple[Tensor, Tensor]]:
    """Returns the sum over ranks, and what this rank gave to it. `mine` is handed over."""
    total, given = yield from sum_between(mine, 0, mine.numel(), values, ctx)
    return gathered(total), gathered(given, mine)


def sum_between(
    acc: Tensor | Vector, start: int, stop: int, values: Values, ctx: Ctx, layout: Layout | None = None
) -> Program[tuple[Tensor | Stream, Tensor | Stream]]:
    """Sums some elements of a vector that need not be in memory; nor need what is returned. With the vector's
    layout, blocks end with its tensors, and `start` and `stop` are edges of blocks."""

    def read(first: int, last: int) -> Tensor:
        first, last = start + first, start + last
        return acc[first:last] if isinstance(acc, Tensor) else acc.between(first, last)

    if values == "exact":
        given = acc[start:stop].clone() if isinstance(acc, Tensor) else acc.between(start, stop)
        total = yield AllReduce(given.clone())
        return total, given
    world, turn = ctx.world, ctx.step % ctx.world
    own = (ctx.rank + turn) % world
    if layout is None:
        shape = RowLayout(VALUE_CODECS[values], world, stop - start, acc.dtype, acc.device)
    else:
        shape = row_layout_over(values, world, acc.dtype, acc.device, layout, start, stop)
    rows = shape.encode(read)
    dealt, one_each = rows.roll(-turn, 0), (1,) * world  # row (r + step) mod P is rank r's
    arrived = yield AllToAll(dealt, one_each, one_each, even=True)
    row = shape.add_up(own, arrived)
    sums = (yield AllGather(row)).roll(turn, 0)
    mine = RoundedSum(own, arrived, sums[own])
    return EncodedVector(shape, sums), EncodedVector(shape, rows, mine)
