"""What an exchange takes on the link: every op of a step as it is carried, rounds times latency and words
times seconds a word, by the function that chooses at run time how collectives go (`comm/rounds.py`).

What an exchange takes on the processor, and what schemes other than stripes ask for, is in
(`costs.py`, `formulas.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm.links import Links, agreed_seconds, measure_links, zeros
from gradsieve.comm.ops import FEW, AllGather, AllReduce, AllToAll, Meter, Op
from gradsieve.comm.rounds import route, seconds_by_route
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.stripes import Stripes
from gradsieve.types import Ctx, Program
from gradsieve.wire.values import VALUE_CODECS

WORD = 4  # bytes
# Share of the elements in vectors and tiny tensors, which are piggybacked whole, as many as a scheme sends at
# most: the MLP of `bench step`. A transformer has a little more.
_SMALL = 0.0005
_PIGGYBACK = 32  # words piggybacked in any exchange: tags, votes, seconds


def blank(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Makes a tensor of that size and no content, for an op that is never carried out."""
    return torch.empty(count, dtype=dtype, device="meta")


def stripes_asks(scheme: Stripes, n: int, world: int, state: Any = None) -> list[Op]:
    """Returns the ops of a usual step of stripes, in tensors without content."""
    if scheme.values == "exact":
        return [AllReduce(blank(scheme.k(n), torch.float32))]
    return rows_asked(round(stripes_row(scheme, n, world, state)), world)


def stripes_row(scheme: Stripes, n: int, world: int, state: Any = None) -> float:
    """Returns the bytes of a row in a step, in the mean."""
    every = (state or scheme.begin(n, world)).layout.between(0, n)
    if not every.number:
        return 0.0
    size = VALUE_CODECS[scheme.values].over(every).predict_size(n, torch.float32)
    return max(1.0, scheme.k(n) * every.number / n / world) * size / every.number


def rows_asked(row: int, world: int) -> list[Op]:
    """Returns the ops of a sum in rows of so many bytes."""
    one_each = (1,) * world
    rows = blank(world * row, torch.uint8).view(world, row)
    return [AllToAll(rows, one_each, one_each, even=True), AllGather(blank(row, torch.uint8))]


def with_piggyback(ops: list[Op], scheme: Scheme[Any], n: int, world: int) -> list[Op]:
    """Adds small tensors and votes to the first all-reduce, or one for them: as `pipeline/frame.py`."""
    small = 0 if scheme.lossless or scheme.round_robin else min(round(_SMALL * n), scheme.k(n))
    for place, op in enumerate(ops):
        if isinstance(op, AllReduce):
            ops[place] = AllReduce(blank(op.tensor.numel() + small + _PIGGYBACK))
            return ops
    return [*ops, AllReduce(blank(small + _PIGGYBACK))]


def link_seconds(ops: Iterable[Op], links: Links, world: int, ours: bool = True) -> float:
    return sum(_seconds(op, links, world, ours) for op in ops)


def _seconds(op: Op, links: Links, world: int, ours: bool) -> float:
    if isinstance(op, AllGather | AllReduce | AllToAll):
        return seconds_by_route(op, world, links)[route(op, world, links if ours else None)]
    meter = Meter(0, world)
    meter.count(op)
    return links.seconds(meter.rounds, meter.moved / WORD)


def seconds_a_bit(links: Links, n: int) -> float:
    return links.word * n / (8 * WORD)


def bits_in(seconds: float, a_bit: float, least: float, most: float) -> float:
    """Bits a parameter that go over the links in that time; as good as any number where they are free."""
    return min(max(seconds / a_bit if a_bit > 0 else most, least), most)


def measure_all(ctx: Ctx, device: torch.device) -> Program[Links]:
    """Measure the links, and the backend's own collectives where there is a choice."""
    links = yield from measure_links(ctx, device)
    if ctx.world <= FEW:
        return links
    asked: list[Callable[[], Op]] = [
        lambda: AllGather(zeros(1, device)),
        lambda: AllReduce(zeros(4 * ctx.world, device)),  # shorter ones leave out some of a ring's messages
    ]
    gather, total = yield from agreed_seconds(asked, ctx, device, "an all-gather and an all-reduce")
    return replace(links, gather=gather, sum=total)
