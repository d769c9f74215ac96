"""What the links between ranks cost, measured."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from gradsieve.comm.ops import AllReduce, Exchange
from gradsieve.errors import Malformed
from gradsieve.types import Ctx, Program, to_host

_LONG = 1 << 16
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Links:
    """The same on every rank."""

    latency: float
    """Seconds that a round takes however short its messages."""
    word: float
    """Seconds for one more word."""

    def seconds(self, rounds: int, words: float) -> float:
        return self.latency * rounds + self.word * words


def measure_links(ctx: Ctx, device: torch.device) -> Program[Links]:
    """Short and long messages around the ring, the quickest of a few; the mean over ranks.

    From `device`: a process group for accelerators carries nothing else.
    """
    to, source = (ctx.rank + 1) % ctx.world, (ctx.rank - 1) % ctx.world
    quickest = []
    for length in (1, _LONG):
        tries = []
        for _ in range(_TRIES):
            message = torch.zeros(length, dtype=torch.int32, device=device)
            start = time.perf_counter()
            reply = yield Exchange(message, to, source, length)
            to_host(reply[:1])  # an accelerator's is only queued so far
            tries.append(time.perf_counter() - start)
        quickest.append(min(tries))
    means = yield AllReduce(torch.tensor(quickest, dtype=torch.float64, device=device))
    short, long = (means / ctx.world).tolist()
    if not (0.0 <= short < math.inf and 0.0 <= long < math.inf):
        raise Malformed(
            f"rank {ctx.rank}, step {ctx.step}: messages around the ring took {short} and {long} seconds in "
            "the mean over ranks: some rank sent what no clock shows"
        )
    return Links(short, max(long - short, 0.0) / (_LONG - 1))
