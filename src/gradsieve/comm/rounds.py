"""Collectives by messages of our own, where the backend's take one after the other for every rank.

gloo's rings take P - 1 messages one after the other for an all-gather and 2 (P - 1) for an all-reduce. With
L = ceil(log2 P) and b words being a rank's own:

    op          in rounds (`bruck.py`)      directly, rank to rank: by all-to-all
                waits    words moved        waits   words moved
    AllGather   L        (P-1) b            1       (P-1) b
    AllReduce   2 L      2 b (P-1)/P        2       2 b (P-1)/P
    AllToAll    L        b L/2              1       b (P-1)/P, as the backend does

Directly pays for tens of ranks that are far apart, rounds for hundreds: P - 1 messages at once are one wait,
but each takes some of a host's time. Words are as many as a ring's.

Replies are those of the op, to the bit, but for the order in which an all-reduce adds up. Every element is
summed by one owner, in one order, so that it is the same bits on every rank.

Which route an op takes follows from its size, P and figures that all ranks agreed on, never from a rank's own
clock: one that chose otherwise would wait for messages that nobody sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeGuard

import torch
from torch import Tensor

from gradsieve.comm import bruck
from gradsieve.comm.links import Links, measure_collectives, measure_links
from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Op
from gradsieve.types import Ctx, Program

FEW = 2  # ranks up to which collectives stay the backend's: a ring of two has nothing to gain
_COPIED = 4e-9  # seconds a word moved of our own copies and sums; a backend does these while it sends
_MESSAGE = 30e-6  # seconds of a host's time that one of many messages at once takes
_SURE = 1.25  # times that ours has to look faster: measured figures are in doubt

Route: TypeAlias = Literal["backend", "rounds", "direct"]
Collective: TypeAlias = AllGather | AllReduce | AllToAll


def route(op: Op, world: int, links: Links | None) -> Route:
    """How the engine carries `op`: the same on every rank. By the backend where nobody knows the links."""
    if links is None or world <= FEW or not has_rounds(op):
        return "backend"
    seconds = seconds_by_route(op, world, links)
    ours: Route = "rounds" if seconds["rounds"] <= seconds["direct"] else "direct"
    return ours if _SURE * seconds[ours] < seconds["backend"] else "backend"


def seconds_by_route(op: Collective, world: int, links: Links) -> dict[Route, float]:
    log = (world - 1).bit_length()  # ceil(log2 P)
    words = op.tensor.numel() * op.tensor.element_size() / 4
    times = 2 if isinstance(op, AllReduce) else 1
    moved = words * (world - 1) * (1 if isinstance(op, AllGather) else times / world)
    direct = times * (links.latency + _MESSAGE * (world - 1)) + links.word * moved
    if isinstance(op, AllToAll):
        return {"backend": direct, "direct": math.inf, "rounds": _in_rounds(links, log, words * log / 2)}
    fixed = links.gather if isinstance(op, AllGather) else links.sum
    return {
        "backend": fixed + links.word * moved,
        "direct": direct + _COPIED * moved,
        "rounds": _in_rounds(links, times * log, moved),
    }


def _in_rounds(links: Links, rounds: int, moved: float) -> float:
    return links.seconds(rounds, moved) + _COPIED * moved


def measure_all(ctx: Ctx, device: torch.device) -> Program[Links]:
    """The links, and the backend's own collectives where there is a choice."""
    links = yield from measure_links(ctx, device)
    if ctx.world > FEW:
        links = yield from measure_collectives(links, ctx, device)
    return links


def has_rounds(op: Op) -> TypeGuard[Collective]:
    """Whether `in_rounds` can carry it: something of a size that is the same for all ranks."""
    match op:
        case AllGather() | AllReduce():
            return op.tensor.numel() > 0
        case AllToAll():
            return op.tensor.numel() > 0 and op.even
        case _:
            return False


def in_rounds(op: Op, rank: int, world: int) -> Program[Tensor]:
    """The reply to an op that `has_rounds`."""
    return _PROGRAMS[type(op)](op.tensor.contiguous(), rank, world)


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
