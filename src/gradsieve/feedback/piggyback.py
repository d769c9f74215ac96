"""Small tensors and the finiteness vote are piggybacked on an all-reduce that takes place anyway."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsieve.comm.ops import AllReduce, Op
from gradsieve.types import Program, Result, by_way_of


def carry(program: Program[Result], piggyback: Tensor) -> Program[tuple[Result, Tensor]]:
    """Run `program` with `piggyback` appended to its first all-reduce; its result and the piggyback's sum.

    A program without a suitable all-reduce is followed by one for the piggyback alone. Ranks agree on which
    one it is, since they agree on the program's ops.
    """
    ride: Tensor | None = None

    def perform(op: Op) -> Program[Tensor]:
        nonlocal ride
        if ride is not None or not isinstance(op, AllReduce) or op.tensor.dtype != piggyback.dtype:
            return (yield op)
        own = op.tensor.numel()
        both = yield AllReduce(torch.cat([op.tensor.flatten(), piggyback]))
        ride = both[own:]
        return both[:own].view_as(op.tensor)

    result = yield from by_way_of(program, perform)
    if ride is None:
        ride = yield AllReduce(piggyback)
    return result, ride
