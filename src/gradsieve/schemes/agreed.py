"""Sums at places that all ranks know: exact, or in few bits with who rounds keeping the error.

    exact    one all-reduce
    others   the vector is dealt out in rows, one an owner. Every rank rounds its values and sends each owner
             its row; the owner adds up what arrives, in rank order, rounds the sum and sends it to everybody.

A rank gave what its rounded values say; the owner of a row gave, beside that, what rounding its sum added.
Owners change from step to step, so that no rank keeps more of the rounding than another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather, AllReduce, AllToAll
from gradsieve.schemes.base import Scheme
from gradsieve.telemetry import stage
from gradsieve.types import Ctx, Program, State
from gradsieve.wire.values import VALUE_CODECS

Values: TypeAlias = Literal["exact", "bf16", "int8", "int4", "int2", "sign"]


@dataclass(frozen=True, kw_only=True)
class Agreed(Scheme[State]):
    """A scheme in which all ranks know the places before any value travels."""

    values: Values = "exact"
    """How values travel. Who rounds keeps the rounding error, so that nothing is lost."""


def sum_agreed(
    mine: Tensor, values: Values, ctx: Ctx, room: Tensor | None = None
) -> Program[tuple[Tensor, Tensor]]:
    """The sum over ranks, and what this rank gave to it. `mine` is handed over, and `room`, if there is some:
    as many elements that the sum may be written to."""
    if values == "exact":
        total = yield AllReduce(mine.clone())
        return total, mine
    codec, world, count = VALUE_CODECS[values], ctx.world, mine.numel()
    width, turn = -(-count // world), ctx.step % world
    spare = world * width - count
    told = (torch.nn.functional.pad(mine, (0, spare)) if spare else mine).view(world, width)
    with stage("encode"):
        rows = codec.encode(told)
        codec.decode_into(rows, told)
    one_each = (1,) * world
    arrived = yield AllToAll(rows.roll(-turn, 0), one_each, one_each)  # row (r + step) mod P is rank r's
    with stage("decode"):
        exact = codec.decode_sum(arrived, width, mine.dtype)
        row = codec.encode(exact[None])[0]
    sums = yield AllGather(row)
    with stage("decode"):
        believed = torch.empty_like(told) if spare or room is None else room.view(world, width)
        codec.decode_into(sums.roll(turn, 0), believed)
        own = (ctx.rank + turn) % world
        told[own] += believed[own] - exact
    return believed.view(-1)[:count], told.view(-1)[:count]
