"""How many teams SparDL should form: few rounds or few words, by the links as they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradsieve.comm.ops import AllReduce, Exchange
from gradsieve.types import Ctx, Program

_LONG = 1 << 16
_TRIES = 3
_WORD = 4


@dataclass(frozen=True, slots=True)
class Links:
    """The same on every rank."""

    latency: float
    """Seconds that a round takes however short its messages."""
    word: float
    """Seconds for one more word."""

    def seconds(self, rounds: int, words: float) -> float:
        return self.latency * rounds + self.word * words


def measure_links(ctx: Ctx) -> Program[Links]:
    """Short and long messages around the ring, the quickest of a few; the mean over ranks."""
    to, source = (ctx.rank + 1) % ctx.world, (ctx.rank - 1) % ctx.world
    quickest = []
    for length in (1, _LONG):
        tries = []
        for _ in range(_TRIES):
            message = torch.zeros(length, dtype=torch.int32)
            start = time.perf_counter()
            yield Exchange(message, to, source, length)
            tries.append(time.perf_counter() - start)
        quickest.append(min(tries))
    short, long = (yield AllReduce(torch.tensor(quickest, dtype=torch.float64))).tolist()
    return Links(short / ctx.world, max(long - short, 0.0) / ctx.world / (_LONG - 1))


def best_teams(world: int, seconds: Callable[[int], float], powers_of_two: bool) -> int:
    """The number of teams that divides the ranks and is quickest by the cost formula."""
    possible = [d for d in range(1, world + 1) if world % d == 0 and not (powers_of_two and d & (d - 1))]
    return min(possible, key=seconds)
