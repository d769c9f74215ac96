"""Collectives by messages of our own, where the engine's take one after the other for every rank.

gloo's rings take P - 1 messages one after the other for an all-gather and 2 (P - 1) for an all-reduce. With
L = ceil(log2 P) and b words being a rank's own:

    op          in rounds (`bruck.py`)      directly, rank to rank: by all-to-all
                waits    words moved        waits   words moved
    AllGather   L        (P-1) b            1       (P-1) b
    AllReduce   2 L      2 b (P-1)/P        2       2 b (P-1)/P
    AllToAll    L        b L/2              1       b (P-1)/P, the engine's own way

Directly pays for tens of ranks that are far apart, rounds for hundreds: P - 1 messages at once are one wait,
but each takes some of a host's time. Words are as many as a ring's.

Replies are those of the op, to the bit, but for the order in which an all-reduce adds up. Every element is
summed by one owner, in one order, so that it is the same bits on every rank.

Which way an op goes follows from its size, P and figures that all ranks agreed on, never from a rank's own
clock: one that chose otherwise would wait for messages that nobody sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gradsieve.comm import bruck
from gradsieve.comm.links import Links, measure_collectives, measure_links
from gradsieve.comm.meter import Meter
from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Exchange, Op, describe
from gradsieve.types import Ctx, Program, Result, by_way_of

FEW = 2
"""Ranks up to which the engine's own collectives stay: a ring of two has nothing to gain."""
_COPIED = 4e-9
"""Seconds a word moved that our own copies and sums take; an engine does these while it sends."""
_MESSAGE = 30e-6
"""Seconds of a host's time that one of many messages at once takes."""
_SURE = 1.25
"""How much faster ours has to look: a choice that gains little is not worth the doubt in measured figures."""

Way: TypeAlias = Literal["engine", "rounds", "direct"]


@dataclass(frozen=True, slots=True)
class Rounds:
    """The ways of one rank's collectives; the same choice on every rank."""

    rank: int
    world: int
    links: Links | None = None
    """None: the engine's own."""

    def carried(self, program: Program[Result]) -> Program[Result]:
        """`program`, whose collectives go in the way that is fastest."""
        if self.links is None or self.world <= FEW:
            return program

        def perform(op: Op) -> Program[Tensor]:
            way = self.chosen(op)
            if way == "engine":
                return (yield op)
            carry = in_rounds if way == "rounds" else directly
            return (yield from carry(op, self.rank, self.world))

        return by_way_of(program, perform)

    def chosen(self, op: Op) -> Way:
        """How `op` goes."""
        if self.links is None or self.world <= FEW or not has_rounds(op):
            return "engine"
        seconds = self._seconds(op, self.links)
        ours: Way = "rounds" if seconds["rounds"] <= seconds["direct"] else "direct"
        return ours if _SURE * seconds[ours] < seconds["engine"] else "engine"

    def seconds(self, op: Op, links: Links) -> float:
        """That `op` takes on the links, the way it goes."""
        match op:
            case AllGather() | AllReduce() | AllToAll():
                return self._seconds(op, links)[self.chosen(op)]
            case _:
                meter = Meter(self.rank, self.world)
                meter.count(op)
                return links.seconds(meter.rounds, meter.moved / 4)

    def _seconds(self, op: Op, links: Links) -> dict[Way, float]:
        world, log = self.world, (self.world - 1).bit_length()
        words = op.tensor.numel() * op.tensor.element_size() / 4
        times = 2 if isinstance(op, AllReduce) else 1
        moved = words * (world - 1) * (1 if isinstance(op, AllGather) else times / world)
        direct = times * (links.latency + _MESSAGE * (world - 1)) + links.word * moved
        if isinstance(op, AllToAll):
            moved = words * log / 2
            return {"engine": direct, "direct": math.inf, "rounds": _ours(links, log, moved)}
        own = links.gather if isinstance(op, AllGather) else links.sum
        return {
            "engine": own + links.word * moved,
            "direct": direct + _COPIED * moved,
            "rounds": _ours(links, times * log, moved),
        }


def _ours(links: Links, rounds: int, moved: float) -> float:
    return links.seconds(rounds, moved) + _COPIED * moved


def measure_all(ctx: Ctx, device: torch.device) -> Program[Links]:
    """The links, and the engine's own collectives where they may have to stand back."""
    links = yield from measure_links(ctx, device)
    if ctx.world > FEW:
        links = yield from measure_collectives(links, ctx, device)
    return links


def has_rounds(op: Op) -> bool:
    """Whether `in_rounds` can carry it: something of a size that is the same for all ranks."""
    match op:
        case AllGather() | AllReduce():
            return op.tensor.numel() > 0
        case AllToAll():
            return op.tensor.numel() > 0 and op.even
        case _:
            return False


def in_rounds(op: Op, rank: int, world: int) -> Program[Tensor]:
    """The reply to an op that `has_rounds`; errors say to which op a message belongs."""
    within = describe(op)

    def named(message: Exchange) -> Program[Tensor]:
        return (yield replace(message, within=within))

    return by_way_of(_PROGRAMS[type(op)](op.tensor.contiguous(), rank, world), named)


def directly(op: Op, rank: int, world: int) -> Program[Tensor]:
    """The reply to an all-gather or an all-reduce, whose parts go from rank to rank."""
    own = op.tensor.contiguous()
    if isinstance(op, AllGather):
        return (yield from _to_all(own.view(-1), world)).view(world, *own.shape)
    ones = (1,) * world
    arrived = yield AllToAll(_rows(own, world), ones, ones, even=True)
    every = yield from _to_all(arrived.sum(0, dtype=own.dtype), world)
    return every.view(-1)[: own.numel()].view_as(own)


def _to_all(row: Tensor, world: int) -> Program[Tensor]:
    ones = (1,) * world
    return (yield AllToAll(row.repeat(world, 1), ones, ones, even=True))


def _rows(own: Tensor, world: int) -> Tensor:
    """One for each rank, the last ones filled up."""
    width = -(-own.numel() // world)
    return torch.nn.functional.pad(own.view(-1), (0, world * width - own.numel())).view(world, width)


def _all_gather(own: Tensor, rank: int, world: int) -> Program[Tensor]:
    size = own.numel()
    every = yield from bruck.gather(own.view(-1), rank, range(world), [size] * world)
    return every.view(world, *own.shape)


def _all_reduce(own: Tensor, rank: int, world: int) -> Program[Tensor]:
    rows = _rows(own, world)
    summed = yield from bruck.scatter_sums(rows, rank)
    every = yield from bruck.gather(summed, rank, range(world), [rows.shape[1]] * world)
    return every[: own.numel()].view_as(own)


def _all_to_all(own: Tensor, rank: int, world: int) -> Program[Tensor]:
    arrived = yield from bruck.transpose(own.view(world, -1), rank)
    return arrived.view_as(own)


_PROGRAMS: dict[type[Op], Callable[[Tensor, int, int], Program[Tensor]]] = {
    AllGather: _all_gather,
    AllReduce: _all_reduce,
    AllToAll: _all_to_all,
}
