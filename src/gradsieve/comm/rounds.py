"""Collectives in about log2 P rounds of messages, where the engine's own take as many as there are ranks.

gloo's rings take P - 1 messages one after the other for an all-gather and 2 (P - 1) for an all-reduce; an
all-to-all goes directly, a few messages at a time. With L = ceil(log2 P), by the algorithms of `bruck.py`:

    op          rounds   words moved, b words being a rank's own    beside the engine's own
    AllGather   L        (P-1) b                                    the same
    AllReduce   2 L      2 b (P-1)/P                                the same
    AllToAll    L        b L/2                                      L/2 times as many; even ones only

Replies are those of the op, to the bit, but for the order in which an all-reduce adds up. Every element is
summed by one owner, in one order, so that it is the same bits on every rank.

Which way an op goes follows from its size, P and figures that all ranks agreed on, never from a rank's own
clock: one that chose otherwise would wait for messages that nobody sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve.comm import bruck
from gradsieve.comm.links import IN_FLIGHT, Links, measure_collectives, measure_links
from gradsieve.comm.meter import Meter
from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Exchange, Op, describe
from gradsieve.types import Ctx, Program, Result, by_way_of

FEW = 4
"""Ranks up to which the engine's own collectives stay: three messages are hardly more than two rounds."""
_COPIED = 4e-9
"""Seconds a word moved that our own copies and sums take; an engine does these while it sends."""
_SURE = 1.25
"""How much faster ours has to look: a choice that gains little is not worth the doubt in measured figures."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The ways of one rank's collectives; the same choice on every rank."""

    rank: int
    world: int
    links: Links | None = None
    """None: the engine's own."""

    def carried(self, program: Program[Result]) -> Program[Result]:
        """`program`, whose collectives go in rounds where that is faster."""
        if self.links is None or self.world <= FEW:
            return program

        def perform(op: Op) -> Program[Tensor]:
            if self.pays(op):
                return (yield from in_rounds(op, self.rank, self.world))
            return (yield op)

        return by_way_of(program, perform)

    def pays(self, op: Op) -> bool:
        """Whether `op` goes in rounds."""
        if self.links is None or self.world <= FEW or not has_rounds(op):
            return False
        rounds, moved, own = self._costs(op, self.links)
        return _SURE * (self.links.seconds(rounds, moved) + _COPIED * moved) < own

    def seconds(self, op: Op, links: Links) -> float:
        """That `op` takes on the links, the way it goes."""
        match op:
            case AllGather() | AllReduce() | AllToAll():
                rounds, moved, own = self._costs(op, links)
                return links.seconds(rounds, moved) + _COPIED * moved if self.pays(op) else own
            case _:
                meter = Meter(self.rank, self.world)
                meter.count(op)
                return links.seconds(meter.rounds, meter.moved / 4)

    def _costs(self, op: Op, links: Links) -> tuple[int, float, float]:
        """Rounds and words of ours; seconds of the engine's own."""
        world, log = self.world, (self.world - 1).bit_length()
        words = op.tensor.numel() * op.tensor.element_size() / 4
        match op:
            case AllGather():
                moved = words * (world - 1)
                return log, moved, links.gather + links.word * moved
            case AllReduce():
                moved = 2 * words * (world - 1) / world
                return 2 * log, moved, links.sum + links.word * moved
            case _:
                batches = math.ceil((world - 1) / IN_FLIGHT)
                return log, words * log / 2, links.seconds(batches, words * (world - 1) / world)


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
    """The reply to an op that `has_rounds`; errors tell to which op a message belongs."""
    within = describe(op)

    def named(message: Exchange) -> Program[Tensor]:
        return (yield replace(message, within=within))

    return by_way_of(_PROGRAMS[type(op)](op.tensor.contiguous(), rank, world), named)


def _all_gather(own: Tensor, rank: int, world: int) -> Program[Tensor]:
    size = own.numel()
    every = yield from bruck.gather(own.view(-1), rank, range(world), [size] * world)
    return every.view(world, *own.shape)


def _all_reduce(own: Tensor, rank: int, world: int) -> Program[Tensor]:
    size = own.numel()
    width = -(-size // world)
    rows = torch.nn.functional.pad(own.view(-1), (0, world * width - size)).view(world, width)
    summed = yield from bruck.scatter_sums(rows, rank)
    every = yield from bruck.gather(summed, rank, range(world), [width] * world)
    return every[:size].view_as(own)


def _all_to_all(own: Tensor, rank: int, world: int) -> Program[Tensor]:
    arrived = yield from bruck.transpose(own.view(world, -1), rank)
    return arrived.view_as(own)


_PROGRAMS: dict[type[Op], Callable[[Tensor, int, int], Program[Tensor]]] = {
    AllGather: _all_gather,
    AllReduce: _all_reduce,
    AllToAll: _all_to_all,
}
