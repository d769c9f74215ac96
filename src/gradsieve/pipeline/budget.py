"""How much is sent in a step, in bits a parameter: a fixed number, or as much as forward and backward hide.

What a budget buys (`spend`): all of a stretch in codes of few bits, and longer stretches before wider codes,
by what part of the energy that sends.

`Adaptive` finds the budget while training runs, by one question: does a step get longer? A rank's seconds
are piggybacked on the exchange, so that all ranks know the same means and choose alike, without a message:

    step       from one exchange's beginning to the next one's
    slack      of that, until the optimizer needs what the exchange brings
    waited     what the optimizer then waited for

On an accelerator these are seconds of the device (`sync/stopwatch.py`): a host that runs ahead of it waits
for the device and not for the exchange.

First it takes a look: next to nothing is sent, and it sees how long a step is then. Then it tries a budget,
in every second exchange, with next to nothing in those between: what else makes a machine slow for a while
makes both slow, and differences of neighbours show what the budget does. Budgets double, up to everything as
it is, until a step is longer by more than ALLOWED, whatever makes it longer: the link is full, or what is
exchanged needs the processors that compute. The largest one that hides is kept for some hundred exchanges,
unless the optimizer begins to wait for it, and tried again.

Where the rounds of an exchange alone take longer than a step computes, no budget hides it. Then the period is
made longer first, to as many steps as it takes, and the bits are found for that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

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
LATE = 2
"""Exchanges after which the seconds of one arrive."""
LOOK, PAIRS, _MOST_PAIRS, KEEP = 6, 6, 24, 320
"""Exchanges of a look; pairs of neighbours after which a budget may be clear, and after which it is left; and
exchanges for which one is kept."""
ALLOWED = 0.05
"""Part by which a step may be longer than one in which next to nothing is sent."""
_SURE = 2.0
"""Standard errors that make it sure enough to send less: what was given up by chance comes back slowly."""
_MORE, _LESS, _MUCH_LESS = 2.0, 0.75, 0.4
"""Factors of a budget that hid; of one that did not; and of one with which a step took half as long again."""
_NEAR = 1.15
"""Two budgets, of which one hides and the other does not, that are so near to each other are near enough."""
_FIRST = 0.5
"""Bits that are tried first, at most; and the part of what the links promise."""
MOST_STEPS = 64
"""Steps to an exchange at most, where a budget chooses them."""
_LONG = 1 << 16


class Times(NamedTuple):
    """Seconds; means over ranks."""

    step: float = 0.0
    slack: float = 0.0
    waited: float = 0.0


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

    @property
    def target(self) -> float:
        return self.bits

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
    every: int = 1
    """Steps to an exchange, which has the bits of all of them."""
    rounds: float = 0.0
    """Seconds that an exchange of next to nothing takes, by the links. 0: the period is the user's choice."""
    bits: float = LEAST
    """Of the next exchange."""
    target: float = 0.0
    """What is tried, or kept; 0: nothing yet."""
    phase: Literal["look", "try", "keep"] = "look"
    count: int = 0
    """Exchanges since it began."""
    used: tuple[float, ...] = (0.0,) * LATE
    """Bits of the last exchanges, of which no seconds have arrived."""
    alone: tuple[Times, ...] = ()
    """With next to nothing sent."""
    steps: tuple[Times, ...] = ()
    """With the target."""
    longer: float = 0.0
    noise: float = 0.0
    """By what part these steps were longer, and the standard error of that."""
    good: float = 0.0
    """The most that hid; 0: none is known."""
    ceiling: float = float("inf")
    """The least that did not."""
    waited: float = 0.0
    """Seconds that are waited for the target where it hides."""

    @classmethod
    def over(cls, links: Links, n: int, world: int, every: int = 1, rounds: float = 0.0) -> Adaptive:
        return cls(cost("exact", world), seconds_a_bit(links, n), rounds=rounds)._with_period(every)

    def _with_period(self, every: int) -> Adaptive:
        factor = every / self.every
        return replace(self, most=self.most / factor, bit=self.bit * factor, every=every)

    def at(self, bits: float) -> Adaptive:
        """As a checkpoint left it, on links and processors that may be others: with a look first."""
        return replace(Adaptive(self.most, self.bit, self.every, self.rounds), target=bits)

    def after(self, times: Times) -> Adaptive:
        """One more exchange, which brought the seconds of an earlier one; none where its step is 0."""
        bits, *rest = *self.used, self.bits
        now = replace(self, used=tuple(rest), count=self.count + 1)
        if times.step > 0:
            if bits == LEAST:
                now = replace(now, alone=(*self.alone, times)[-_MOST_PAIRS:])
            elif bits == self.target:
                now = replace(now, steps=(*self.steps, times)[-_MOST_PAIRS:])
        match self.phase:
            case "look":
                return now._after_look() if len(now.alone) >= LOOK else now
            case "try":
                return now._after_pair()
            case "keep":
                return now._while_kept()

    def says(self, world: int) -> str:
        """A line when a budget was found; otherwise nothing."""
        if self.phase != "keep" or self.count:
            return ""
        values, share = spend(self.every * self.bits, world)
        longest = self.every / share
        turns = f", so that every element is sent within about {longest:.0f} steps" if longest > 1 else ""
        period = f" every {self.every} steps" if self.every > 1 else ""
        sent = (
            f"sends {self.bits:.3g} bits a parameter and step{period}: {share:.1%} of all, as {values}{turns}"
        )
        noise = f"(+- {self.noise:.1%})"
        return f"{sent}; a step takes {self.longer:.1%} {noise} longer than with next to nothing sent"

    def _after_look(self) -> Adaptive:
        step, slack, waited = (statistics.median(each) for each in zip(*self.alone, strict=True))
        # Ranks that wait for a slow one have fast links, and a longer period would not help them.
        if 2 * self.rounds > slack > 0 and waited > ALLOWED * step and self.every < MOST_STEPS:
            more = math.ceil(waited / (step - waited) * self.every)
            return self._with_period(min(self.every + more, MOST_STEPS)).at(0.0)
        return self._try_from(self.target or bits_in(_FIRST * slack, self.bit, LEAST, _FIRST))

    def _try_from(self, target: float) -> Adaptive:
        """With nothing known: from so much on, up or down. Less than twice the least tells nothing."""
        fresh = replace(self, good=0.0, ceiling=float("inf"))
        return fresh._try(max(target, 2 * LEAST))

    def _try(self, target: float) -> Adaptive:
        """In every second exchange."""
        return replace(self, phase="try", count=0, bits=LEAST, target=target, alone=(), steps=())

    def _keep(self, target: float) -> Adaptive:
        return replace(self, phase="keep", count=0, bits=target, target=target, steps=())

    def _after_pair(self) -> Adaptive:
        now = replace(self, bits=LEAST if self.bits == self.target else self.target)
        pairs = min(len(self.alone), len(self.steps))
        if pairs < PAIRS:
            return now
        longer, noise = _difference(self.alone, self.steps)
        now = replace(now, longer=longer, noise=noise)
        is_clear = pairs == _MOST_PAIRS
        if longer - _SURE * noise > ALLOWED or (is_clear and longer > ALLOWED):
            return now._did_not_hide()
        return now._hid() if longer + noise < ALLOWED or is_clear else now

    def _hid(self) -> Adaptive:
        waited = statistics.median(times.waited for times in self.steps)
        now = replace(self, good=self.target, waited=waited)
        if self.target >= self.most or self.ceiling <= _NEAR * self.target:
            return now._keep(self.target)
        return now._try(min(_MORE * self.target, (self.target * self.ceiling) ** 0.5, self.most))

    def _did_not_hide(self) -> Adaptive:
        now = replace(self, ceiling=self.target)
        if self.good:
            is_near = self.target <= _NEAR * self.good
            return now._keep(self.good) if is_near else now._try((self.good * self.target) ** 0.5)
        less = self.target * (_LESS if self.longer < 0.5 else _MUCH_LESS)
        return now._try(less) if less > 1.5 * LEAST else now._keep(LEAST)

    def _while_kept(self) -> Adaptive:
        recent = [times.waited for times in self.steps[-PAIRS:]]
        if self.count < KEEP:
            if len(recent) < PAIRS:
                return self
            patience = 2 * ALLOWED * statistics.median(times.step for times in self.steps)
            if statistics.median(recent) <= self.waited + patience:
                return self
        return self._try_from(self.target)


def _difference(alone: Sequence[Times], steps: Sequence[Times]) -> tuple[float, float]:
    """By what part the second are longer than their neighbours, and the standard error of that."""
    more = [long.step - short.step for short, long in zip(alone, steps, strict=False)]
    usual = statistics.median(times.step for times in alone)
    return statistics.median(more) / usual, _error(more) / usual


def _error(seconds: Sequence[float]) -> float:
    """Standard error of the median, by the median deviation: some steps are far off, and say nothing."""
    middle = statistics.median(seconds)
    deviation = 1.4826 * statistics.median(abs(each - middle) for each in seconds)
    return 1.2533 * deviation / math.sqrt(len(seconds))


Budget: TypeAlias = Fixed | Adaptive
