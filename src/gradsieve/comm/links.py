"""What the links between ranks cost, measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather, AllReduce, Exchange, Op
from gradsieve.errors import Malformed
from gradsieve.types import Ctx, Program, to_host

_LONG, _LONGEST = 1 << 16, 1 << 24  # words of the first long message, and of the longest
# Rounds after which a connection on a far link sends as fast as it ever does: it begins with some 14 kB and
# doubles that in every round.
_SLOW_START = 16
_TRIES = 3
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Links:
    """What they cost in seconds, the same on every rank."""

    latency: float  # of a round, however short its messages
    word: float  # one more
    gather: float = 0.0  # an all-gather by the backend itself, however short
    sum: float = 0.0  # an all-reduce

    @classmethod
    def at(cls, latency: float, bandwidth: float) -> Links:
        """That carry so many bit/s."""
        return cls(latency, _WORD_BITS / bandwidth)

    @property
    def bandwidth(self) -> float:
        """bit/s."""
        return _WORD_BITS / self.word

    def seconds(self, rounds: int, words: float) -> float:
        return self.latency * rounds + self.word * words


def nominal(world: int) -> Links:
    """For ranks that did not measure, so that a run which is repeated chooses alike: one switch at 10 Gbit/s,
    and gloo's rings on it. Such figures let rounds pay from some 16 ranks on, for messages up to a few MB."""
    hop = 30e-6
    return Links(100e-6, _WORD_BITS / 10e9, hop * (world - 1), 2 * hop * (world - 1))


def measure_links(ctx: Ctx, device: torch.device) -> Program[Links]:
    """Short and long messages around the ring, the quickest of a few; the mean over ranks. Messages become
    longer until they take far longer than a round: what one word more takes is then the link's doing.

    From `device`, as exchanges are: the way through the host's memory is a part of what they take.
    """
    to, source = (ctx.rank + 1) % ctx.world, (ctx.rank - 1) % ctx.world

    def message(words: int) -> Callable[[], Op]:
        return lambda: Exchange(_zeros(words, device), to, source, words)

    what = "messages around the ring"
    before, words = 1, _LONG
    latency, now = yield from _agreed_seconds([message(1), message(words)], ctx, device, what)
    last = latency
    while now < _SLOW_START * latency and words < _LONGEST:
        before, words, last = words, 4 * words, now
        (now,) = yield from _agreed_seconds([message(words)], ctx, device, what)
    return Links(latency, max(now - last, 0.0) / (words - before))


def measure_collectives(links: Links, ctx: Ctx, device: torch.device) -> Program[Links]:
    """`links`, with what the backend's own collectives cost on them."""
    asked: list[Callable[[], Op]] = [
        lambda: AllGather(_zeros(1, device)),
        lambda: AllReduce(_zeros(4 * ctx.world, device)),  # shorter ones leave out some of a ring's messages
    ]
    gather, total = yield from _agreed_seconds(asked, ctx, device, "an all-gather and an all-reduce")
    return replace(links, gather=gather, sum=total)


def _zeros(length: int, device: torch.device) -> Tensor:
    return torch.zeros(length, dtype=torch.int32, device=device)


def _agreed_seconds(
    asked: Sequence[Callable[[], Op]], ctx: Ctx, device: torch.device, what: str
) -> Program[list[float]]:
    """Of each op the quickest of a few; the mean over ranks."""
    quickest = []
    for ask in asked:
        tries = []
        for _ in range(_TRIES):
            op = ask()
            start = time.perf_counter()
            reply = yield op
            to_host(reply.view(-1)[:1])  # an accelerator's is only queued so far
            tries.append(time.perf_counter() - start)
        quickest.append(min(tries))
    means = yield AllReduce(torch.tensor(quickest, dtype=torch.float64, device=device))
    seconds: list[float] = (means / ctx.world).tolist()
    if not all(0.0 <= each < math.inf for each in seconds):
        raise Malformed(
            f"rank {ctx.rank}, step {ctx.step}: {what} took {seconds} seconds in the mean over ranks: some "
            "rank sent what no clock shows"
        )
    return seconds
