"""Collectives in ceil(log2 m) rounds, for any number of members m (Bruck et al., 1997).

`gather`: in round i every member holds the messages of 2^i members from itself on; it gets the next ones
from the member 2^i places further and gives its own to the one 2^i places before. Messages may differ in
length as long as everybody knows the lengths.

`transpose`: one number from everybody to everybody. What has d places to go travels in the rounds i in which
d has bit i, by 2^i places each. Half the numbers move in a round: for few of them, where rounds cost more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from gradsieve.comm.ops import Exchange
from gradsieve.types import Program


def gather(own: Tensor, place: int, ranks: Sequence[int], lengths: Sequence[int]) -> Program[Tensor]:
    """The messages of all members end to end; `ranks` and `lengths` are in member order, `place` is ours."""
    members = len(ranks)
    edges = [0, *accumulate(lengths[(place + ahead) % members] for ahead in range(members))]
    held, count = own, 1
    while count < members:
        more = min(count, members - count)
        to, source = ranks[(place - count) % members], ranks[(place + count) % members]
        received = yield Exchange(held[: edges[more]].clone(), to, source, edges[count + more] - edges[count])
        held = torch.cat([held, received])
        count += more
    first = edges[(members - place) % members]  # where the message of member 0 starts
    return torch.cat([held[first:], held[:first]])


def transpose(numbers: Tensor, rank: int) -> Program[Tensor]:
    """From `numbers[j]` for rank j, on every rank, to the numbers that all ranks have for this one."""
    world = numbers.numel()
    far = torch.arange(world, dtype=torch.int64, device=numbers.device)
    held = numbers[(rank + far) % world]  # by the places still to go
    for power in range((world - 1).bit_length()):
        hop = 1 << power
        moving = (far & hop).bool()
        reply = yield Exchange(held[moving], (rank + hop) % world, (rank - hop) % world, int(moving.sum()))
        held = held.clone()
        held[moving] = reply
    return held[(rank - far) % world]
