"""Collectives in ceil(log2 m) rounds, for any number of members m (Bruck et al., 1997).

`gather`: in round i every member holds the messages of 2^i members from itself on; it gets the next ones
from the member 2^i places further and gives its own to the one 2^i places before. Messages may differ in
length as long as everybody knows the lengths.

`scatter_sums`: the same rounds backwards, each message the other way and added up where it arrives: halving
instead of doubling. Every member gets the sum of one row, formed in one place and one order, so that a
`gather` of these sums is an all-reduce with the same bits everywhere.

`transpose`: one row from everybody to everybody. What has d places to go travels in the rounds i in which
d has bit i, by 2^i places each. Half the rows move in a round: for little, where rounds cost more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradsieve.comm.ops import Exchange
from gradsieve.types import Program


def gather(own: Tensor, place: int, ranks: Sequence[int], lengths: Sequence[int]) -> Program[Tensor]:
    """The messages of all members end to end; `ranks` and `lengths` are in member order, `place` is ours."""
    members = len(ranks)
    ahead = np.roll(np.asarray(lengths, dtype=np.int64), -place)  # from ourselves on
    edges = [0, *ahead.cumsum().tolist()]
    held = own.new_empty(edges[-1])
    held[: own.numel()] = own
    for count, more in _doubling(members):
        to, source = ranks[(place - count) % members], ranks[(place + count) % members]
        here = slice(edges[count], edges[count + more])
        held[here] = yield Exchange(held[: edges[more]].clone(), to, source, here.stop - here.start)
    first = edges[(members - place) % members]  # where the message of member 0 starts
    return torch.cat([held[first:], held[:first]])


def scatter_sums(rows: Tensor, rank: int) -> Program[Tensor]:
    """From as many rows as ranks, on every rank, to the sum over ranks of row `rank`."""
    world, width = rows.shape
    held = rows.roll(-rank, 0)  # by the places still to go
    for count, more in reversed(_doubling(world)):
        given = held[count : count + more].flatten()
        arrived = yield Exchange(given, (rank + count) % world, (rank - count) % world, more * width)
        held[:more] += arrived.view(more, width)
    return held[0].clone()


def _doubling(members: int) -> list[tuple[int, int]]:
    """What is held before a round, and what the round adds to it."""
    counts = [1 << power for power in range((members - 1).bit_length())]
    return [(count, min(count, members - count)) for count in counts]


def transpose(rows: Tensor, rank: int) -> Program[Tensor]:
    """From `rows[j]` for rank j, on every rank, to the rows that all ranks have for this one."""
    world = rows.shape[0]
    far = np.arange(world)
    held = rows.roll(-rank, 0)  # by the places still to go
    for power in range((world - 1).bit_length()):
        hop = 1 << power
        moving = torch.from_numpy(np.flatnonzero(far & hop)).to(rows.device)
        given = held[moving]
        reply = yield Exchange(given.flatten(), (rank + hop) % world, (rank - hop) % world, given.numel())
        held[moving] = reply.view_as(given)
    return held[torch.from_numpy((rank - far) % world).to(rows.device)]
