"""Costs of the links between ranks, assumed or measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.comm.ops import AllReduce, Exchange, Op
from gradsieve.errors import Malformed
from gradsieve.types import Ctx, Program, to_host

_LONG, _LONGEST = 1 << 16, 1 << 24  # words of the first long message, and of the longest
_SLOW_START = 16  # rounds until a far connection is at full speed: 14 kB at first, twice as much each round
_TRIES = 3
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Links:
    """Costs in seconds, the same on every rank."""

    latency: float  # of a round, however short its messages
    word: float  # of one more word
    gather: float = 0.0  # of an all-gather by the backend itself, however short
    sum: float = 0.0  # of an all-reduce

    @classmethod
    def at(cls, latency: float, bandwidth: float) -> Links:
        """Return links that carry so many bit/s."""
        return cls(latency, _WORD_BITS / bandwidth)

    @property
    def bandwidth(self) -> float:
        """bit/s"""
        return _WORD_BITS / self.word

    def seconds(self, rounds: int, words: float) -> float:
        return self.latency * rounds + self.word * words


def nominal(world: int) -> Links:
    """Return what ranks assume that measure nothing, so that a run which is repeated chooses the same routes:
    one switch at 10 Gbit/s, and gloo's rings on it. With these figures rounds pay from some 16 ranks on, for
    messages up to a few MB."""
    hop = 30e-6
    return Links(100e-6, _WORD_BITS / 10e9, hop * (world - 1), 2 * hop * (world - 1))


def measure_links(ctx: Ctx, device: torch.device) -> Program[Links]:
    """Time short and long messages around the ring, the quickest of a few, and return the mean over ranks.

    Messages become longer until they take far longer than a round: what one word more takes is then the
    link's doing. They start from `device`, as exchanges do: the way through the host's memory counts.
    """
    to, source = (ctx.rank + 1) % ctx.world, (ctx.rank - 1) % ctx.world

    def message(words: int) -> Callable[[], Op]:
        return lambda: Exchange(zeros(words, device), to, source, words)

    what = "messages around the ring"
    before, words = 1, _LONG
    latency, now = yield from agreed_seconds([message(1), message(words)], ctx, device, what)
    last = latency
    while now < _SLOW_START * latency and words < _LONGEST:
        before, words, last = words, 4 * words, now
        (now,) = yield from agreed_seconds([message(words)], ctx, device, what)
    return Links(latency, max(now - last, 0.0) / (words - before))


def zeros(length: int, device: torch.device) -> Tensor:
    return torch.zeros(length, dtype=torch.int32, device=device)


def agreed_seconds(
    asked: Sequence[Callable[[], Op]], ctx: Ctx, device: torch.device, what: str
) -> Program[list[float]]:
    """Time each op, the quickest of a few, and return the mean over ranks."""
    quickest = []
    for ask in asked:
        tries = []
        for _ in range(_TRIES):
            op = ask()
            start = time.perf_counter()
            reply = yield op
            to_host(reply.view(-1)[:1])  # an accelerator has only queued the reply so far
            tries.append(time.perf_counter() - start)
        quickest.append(min(tries))
    means = yield AllReduce(torch.tensor(quickest, dtype=torch.float64, device=device))
    seconds: list[float] = (means / ctx.world).tolist()
    if not all(0.0 <= mean < math.inf for mean in seconds):
        raise Malformed(
            f"rank {ctx.rank}, step {ctx.step}: {what} took {seconds} seconds in the mean over ranks: some "
            "rank sent an invalid time"
        )
    return seconds
