"""An all-gather in ceil(log2 m) rounds among some of the ranks (Bruck et al., 1997).

In round i every member holds the messages of 2^i members from itself on; it gets the next ones from the
member 2^i places further and gives its own to the one 2^i places before. Any number of members; messages
may differ in length as long as everybody knows the lengths.
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
