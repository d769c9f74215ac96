"""Collectives by messages of our own, where the backend's take one after the other for every rank.

gloo's rings take P - 1 messages one after the other for an all-gather and 2 (P - 1) for an all-reduce. With
L = ceil(log2 P) and b words being a rank's own:

    op          in rounds (Bruck et al., 1997)   directly, rank to rank: by all-to-all
                waits    words moved             waits   words moved
    AllGather   L        (P-1) b                 1       (P-1) b
    AllReduce   2 L      2 b (P-1)/P             2       2 b (P-1)/P
    AllToAll    L        b L/2                   1       b (P-1)/P, as the backend does

Direct messages pay for tens of ranks that are far apart, rounds for hundreds: P - 1 messages at once are one
wait, but each takes some of a host's time. Words are as many as a ring's.

Replies are those of the op, to the bit, but for the order in which an all-reduce adds up. Every element is
summed by one owner, in one order, so that it is the same bits on every rank.

The route of an op follows from its size, P and figures that all ranks agreed on, never from a rank's own
clock: a rank that chose otherwise would wait for messages that no rank sends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, TypeGuard

import torch
from torch import Tensor

from gradsieve.comm.links import Links
from gradsieve.comm.ops import FEW, AllGather, AllReduce, AllToAll, Exchange, Op
from gradsieve.types import Host, Program

_COPIED = 4e-9  # seconds a word moved of our own copies and sums; a backend does these while it sends
_MESSAGE = 30e-6  # seconds of a host's time that one of many messages at once takes
_SURE = 1.25  # times that ours has to look faster: measured figures are in doubt

Route: TypeAlias = Literal["backend", "rounds", "direct"]
Collective: TypeAlias = AllGather | AllReduce | AllToAll


def program_for(op: Op, rank: int, world: int, links: Links) -> Program[Tensor] | None:
    """Return the messages that carry `op`; None if the backend does."""
    chosen = route(op, world, links)
    if chosen == "backend":
        return None
    return (in_rounds if chosen == "rounds" else directly)(op, rank, world)


def route(op: Op, world: int, links: Links | None) -> Route:
    """Return how `op` is carried, the same on every rank."""
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
        in_turn = words * log / 2
        rounds = links.seconds(log, in_turn) + _COPIED * in_turn
        return {"backend": direct, "direct": math.inf, "rounds": rounds}
    fixed = links.gather if isinstance(op, AllGather) else links.sum
    return {
        "backend": fixed + links.word * moved,
        "direct": direct + _COPIED * moved,
        "rounds": links.seconds(times * log, moved) + _COPIED * moved,
    }


def has_rounds(op: Op) -> TypeGuard[Collective]:
    """Say whether `in_rounds` can carry `op`: its size is the same for all ranks, and not zero."""
    is_even = isinstance(op, AllGather | AllReduce) or (isinstance(op, AllToAll) and op.even)
    return is_even and op.tensor.numel() > 0


# -- rank to rank ------------------------------------------------------------------------------------------


def directly(op: Op, rank: int, world: int) -> Program[Tensor]:
    """Return the reply to an all-gather or an all-reduce, whose parts go from rank to rank."""
    own = op.tensor.contiguous()
    if isinstance(op, AllGather):
        return (yield from _to_all(own.view(-1), world)).view(world, *own.shape)
    ones = (1,) * world
    arrived = yield AllToAll(_rows(own, world), ones, ones, even=True)
    sums = yield from _to_all(arrived.sum(0, dtype=own.dtype), world)
    return sums.view(-1)[: own.numel()].view_as(own)


def _to_all(row: Tensor, world: int) -> Program[Tensor]:
    ones = (1,) * world
    return (yield AllToAll(row.repeat(world, 1), ones, ones, even=True))


def _rows(own: Tensor, world: int) -> Tensor:
    """Cut a tensor into a row for each rank, the last ones filled up."""
    width = -(-own.numel() // world)
    return torch.nn.functional.pad(own.view(-1), (0, world * width - own.numel())).view(world, width)


# -- in rounds ---------------------------------------------------------------------------------------------


def in_rounds(op: Op, rank: int, world: int) -> Program[Tensor]:
    """Return the reply to an op that `has_rounds`."""
    own, ranks = op.tensor.contiguous(), range(world)
    if isinstance(op, AllGather):
        gathered = yield from gather(own.view(-1), rank, ranks, [own.numel()] * world)
        return gathered.view(world, *own.shape)
    if isinstance(op, AllReduce):
        rows = _rows(own, world)
        summed = yield from scatter_sums(rows, rank)
        sums = yield from gather(summed, rank, ranks, [rows.shape[1]] * world)
        return sums[: own.numel()].view_as(own)
    return (yield from transpose(own.view(world, -1), rank)).view_as(own)


def gather(own: Tensor, place: int, ranks: Sequence[int], lengths: Sequence[int] | Host) -> Program[Tensor]:
    """Return the messages of all members end to end; `ranks` and `lengths` are in member order, `place` is
    this rank's.

    In round i every member holds the messages of 2^i members from itself on; it gets the next ones from the
    member 2^i places further and gives its own to the one 2^i places before. Messages may differ in length.
    """
    members = len(ranks)
    ahead = torch.as_tensor(lengths, dtype=torch.int64, device="cpu").roll(-place)  # from this rank on
    edges = [0, *ahead.cumsum(0).tolist()]
    held = own.new_empty(edges[-1])
    held[: own.numel()] = own
    for count, more in _doubling(members):
        to, source = ranks[(place - count) % members], ranks[(place + count) % members]
        here = slice(edges[count], edges[count + more])
        held[here] = yield Exchange(held[: edges[more]].clone(), to, source, here.stop - here.start)
    first = edges[(members - place) % members]  # where the message of member 0 starts
    return torch.cat([held[first:], held[:first]])


def scatter_sums(rows: Tensor, rank: int) -> Program[Tensor]:
    """Return the sum over ranks of row `rank`, of as many rows as ranks.

    These are the rounds of `gather` backwards, each message the other way and added up where it arrives. Each
    row is summed in one place and one order: gathered, the sums are the same bits on every rank.
    """
    world, width = rows.shape
    held = rows.roll(-rank, 0)  # by the places still to go
    for count, more in reversed(_doubling(world)):
        sent = held[count : count + more].flatten()
        arrived = yield Exchange(sent, (rank + count) % world, (rank - count) % world, more * width)
        held[:more] += arrived.view(more, width)
    return held[0].clone()


def _doubling(members: int) -> list[tuple[int, int]]:
    """Return how much is held before each round, and how much the round adds to it."""
    counts = [1 << power for power in range((members - 1).bit_length())]
    return [(count, min(count, members - count)) for count in counts]


def transpose(rows: Tensor, rank: int) -> Program[Tensor]:
    """Return the rows that all ranks have for this one; `rows[j]` is for rank j.

    A row with d places to go travels in the rounds i in which d has bit i, by 2^i places each. Half of the
    rows move in a round: for little, where rounds cost more.
    """
    world = rows.shape[0]
    far = torch.arange(world, dtype=torch.int64, device="cpu")  # on the host: how many move is to be known
    held = rows.roll(-rank, 0)  # by the places still to go
    for power in range((world - 1).bit_length()):
        hop = 1 << power
        moving = (far & hop).nonzero().flatten().to(rows.device)
        sent = held[moving]
        reply = yield Exchange(sent.flatten(), (rank + hop) % world, (rank - hop) % world, sent.numel())
        held[moving] = reply.view_as(sent)
    return held[((rank - far) % world).to(rows.device)]
