"""How much is sent in a step, in bits a parameter: a fixed number, or as much as forward and backward hide.

What a budget buys (`spend`): all of a stretch in codes of few bits, and longer stretches before wider codes,
by what part of the energy that sends.

`Adaptive` finds the budget while training runs. A rank's seconds are piggybacked on the exchange, so that
all ranks know the same means and choose alike, without a message for it:

    step       from one exchange's beginning to the next one's
    slack      of that, until the optimizer needs what the exchange brings
    waited     what the optimizer then waited for
    computed   processor time of the thread that exchanges: forward and backward may need the same processor

It goes by epochs of a few steps, and takes medians. Now and then it takes a look: next to nothing is sent,
and it measures how long ranks wait for the slowest one, and how much they compute whatever is sent. No budget
changes either. Then more and more is sent until the wait beyond that is more than WAITED of a step, or the
computing more than COMPUTED of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch

from gradsieve.comm.links import Links
from gradsieve.errors import ConfigError
from gradsieve.kernels.blocks import Layout, block_layout
from gradsieve.pipeline.costs import bits_in, seconds_a_bit
from gradsieve.schemes.agreed import Values
from gradsieve.types import is_number
from gradsieve.wire.values import VALUE_CODECS

SENT: dict[Values, float] = {"sign": 0.637, "int2": 0.881, "int4": 0.985, "bf16": 0.99999, "exact": 1.0}
"""Part of a Gaussian's energy that codes of this kind send."""
LEAST = 0.05
"""Bits with which a look is taken. With less than that models do not learn well."""
EPOCH, SETTLING = 6, 2
"""Steps of an epoch, and those at its beginning that are not evaluated: seconds are sent one step late."""
LOOK_AGAIN, _SETTLED = 40, 8
"""Epochs between two looks, and after a look until it is worth a line."""
WAITED, COMPUTED = 0.05, 0.015
"""The second is small for hosts on which ranks share a processor: there a second computed costs two."""
SLOWEST, FASTEST = 0.5, 1.6
"""Factors within which the budget changes from one epoch to the next."""
LESS, PATIENCE = 0.75, 1.03
"""Of a budget that made ranks wait: what is tried instead; and the growth, an epoch, of what is not tried
again yet, since one bad epoch says little."""
_CAUTION, _FIRST = 0.5, 0.5
"""Part of what the links promise that is tried first; and bits at most, as links do not show what computing
costs."""
_LONG = 1 << 16


class Times(NamedTuple):
    """Seconds; means over ranks."""

    step: float = 0.0
    slack: float = 0.0
    waited: float = 0.0
    computed: float = 0.0


_NONE = Times()


def spend(bits: float, world: int, costs: Mapping[Values, float] | None = None) -> tuple[Values, float]:
    """How values travel, and the share of all that does, for so many bits a parameter and step. `costs`: of
    the model, where its tensors are known."""
    if world == 1:
        return "exact", 1.0
    costs = costs or {values: cost(values, world) for values in SENT}
    shares = {values: min(1.0, bits / costs[values]) for values in SENT}
    best = max(SENT, key=lambda values: shares[values] * SENT[values])
    return best, shares[best]


def cost(values: Values, world: int, layouts: Sequence[Layout] = ()) -> float:
    """Bits that the busiest rank moves for one element: there, and the sum back. Of a model of these units;
    of one in few large tensors, where none are given."""
    codec = VALUE_CODECS[values]
    units = [layout.between(0, int(layout.edges[-1])) for layout in layouts or [block_layout((_LONG,))]]
    size = sum(codec.over(unit).predict_size(unit.count, torch.float32) for unit in units)
    return 2.0 * 8 * size / max(1, sum(unit.count for unit in units)) * (world - 1) / world


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same in every step: a run that is repeated is the same bits."""

    bits: float

    def __post_init__(self) -> None:
        if not is_number(self.bits):
            raise ConfigError(f"bits={self.bits!r} is a {type(self.bits).__name__}: give a number, bits=0.75")
        if not 0 < self.bits < float("inf"):
            raise ConfigError(f"bits are a budget a parameter and step, above 0, not {self.bits!r}")

    def after(self, times: Times) -> Fixed:
        return self

    def at(self, bits: float) -> Fixed:
        return self

    def says(self, world: int) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Adaptive:
    """The same on every rank."""

    most: float
    """Bits with which everything is sent as it is."""
    bit: float
    """Seconds that one more bit a parameter takes, by the links: for the first try only."""
    bits: float = LEAST
    found: float = 0.0
    """Bits to go on with after the look that is being taken; 0: none were found so far."""
    looking: bool = True
    alone: Times = _NONE
    """Of a step in which next to nothing was sent."""
    ceiling: float = float("inf")
    """Bits beyond which ranks waited longer."""
    epochs: int = 0
    """Since the last look."""
    seen: tuple[Times, ...] = ()
    every: int = 1
    """Steps to an exchange, which has the bits of all of them."""

    @classmethod
    def over(cls, links: Links, n: int, world: int, every: int = 1) -> Adaptive:
        return cls(cost("exact", world) / every, seconds_a_bit(links, n) * every, every=every)

    def at(self, bits: float) -> Adaptive:
        """As a checkpoint left it, on links and processors that may be others: with a look first."""
        return replace(self, bits=LEAST, found=bits, looking=True, ceiling=float("inf"), epochs=0, seen=())

    def after(self, times: Times) -> Adaptive:
        """One more step."""
        seen = (*self.seen, times)
        if len(seen) < EPOCH:
            return replace(self, seen=seen)
        steady = seen[SETTLING:]
        median = Times(*(statistics.median(seconds) for seconds in zip(*steady, strict=True)))
        now = replace(self, seen=(), epochs=self.epochs + 1)
        return now._after_look(median) if self.looking else now._after_epoch(median)

    def says(self, world: int) -> str:
        """A line after a look, and one after the budget has converged; otherwise nothing."""
        if self.looking or self.seen or self.epochs not in (0, _SETTLED):
            return ""
        values, share = spend(self.every * self.bits, world)
        longest = self.every / share
        turns = f", so that every element is sent within about {longest:.0f} steps" if longest > 1 else ""
        return (
            f"sends {self.bits:.3g} bits a parameter and step: {share:.1%} of all, as {values}{turns}; with "
            f"next to nothing sent, ranks wait {1e3 * self.alone.waited:.1f} ms of "
            f"{1e3 * self.alone.step:.1f} for the slowest one"
        )

    def _after_look(self, median: Times) -> Adaptive:
        bits = max(self.found or bits_in(_CAUTION * median.slack, self.bit, LEAST, _FIRST), LEAST)
        return replace(self, looking=False, bits=bits, alone=median, epochs=0)

    def _after_epoch(self, median: Times) -> Adaptive:
        if self.epochs >= LOOK_AGAIN:
            return replace(self, looking=True, bits=LEAST, found=self.bits)
        if median.waited > self.alone.waited + WAITED * self.alone.step:
            return replace(self, bits=max(LESS * self.bits, LEAST), ceiling=self.bits)
        more = median.computed - self.alone.computed
        factor = COMPUTED * median.step / more if more > 0 else FASTEST
        bits = self.bits * min(max(factor, SLOWEST), FASTEST)
        return replace(
            self, bits=min(max(bits, LEAST), self.most, self.ceiling), ceiling=PATIENCE * self.ceiling
        )


Budget: TypeAlias = Fixed | Adaptive
