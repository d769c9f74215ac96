"""Small tensors and the finiteness vote ride along in an all-reduce that takes place anyway."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsieve.comm.ops import AllReduce
from gradsieve.types import Program, Result


def carry(program: Program[Result], rider: Tensor) -> Program[tuple[Result, Tensor]]:
    """Run `program` with `rider` appended to its first all-reduce; its result and the rider's sum.

    A program without a suitable all-reduce is followed by one for the rider alone. Ranks agree on which it
    is, since they agree on the program's ops.
    """
    ride: Tensor | None = None
    reply: Tensor | None = None
    while True:
        try:
            op = program.send(reply)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as end:
            if ride is None:
                ride = yield AllReduce(rider)
            return end.value, ride
        if ride is None and isinstance(op, AllReduce) and op.tensor.dtype == rider.dtype:
            own = op.tensor.numel()
            both = yield AllReduce(torch.cat([op.tensor.flatten(), rider]))
            reply, ride = both[:own].view_as(op.tensor), both[own:]
        else:
            reply = yield op
