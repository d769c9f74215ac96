"""How much is sent, in bits a parameter and step: chosen once, then fixed.

More bits than quality needs bring nothing, and how many it needs follows from the number of ranks (`needed`).
A link or a processor may not carry them behind a step. So the first exchanges are timed, the first ones with
LEAST bits and the next with those that are needed:

    period     from one exchange's beginning to the next one's
    exchange   what it takes
    slack      from its beginning until optimizers need what it brings; they wait for the rest of it

Two points give what a bit takes, and what rounds take however little is sent. `choose` then takes, of fewer
bits and of longer periods, what has the same loss soonest. All ranks choose alike, by figures that they
gather once. No clock decides anything afterwards, and checkpoints keep the choice.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsieve.comm.ops import AllGather
from gradsieve.errors import ConfigError, Malformed
from gradsieve.types import Program, is_number

LEAST = 0.15
LITTLE, ALL = 4, 8  # exchanges with LEAST bits; and with those that are needed, by then
# Ranks up to which so many bits end level with dense, and times the steps to the same loss with a fifth of
# them. With 4 ranks 0.15 bits took 200 steps where 0.75 took 180; with 16 ranks losses of 400 steps with 0.75
# and with 4 bits are 8 % apart, some 30 % of the steps. With 8 ranks nothing was measured: between both.
_NEEDED = ((4, 0.75, 1.11), (8, 2.0, 1.2), (16, 4.0, 1.3))
_MORE_RANKS = (8.0, 1.3)  # with 64 ranks 8 bits still ended 5 % above dense
_THREEFOLD = 1.06  # times the steps with a period three times as long: 220 steps for 207, with 8 ranks
MOST_STEPS = 64
_PERIODS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MOST_STEPS)
_LONGEST = 1e6  # seconds, and not what a clock shows
_NEAR = 1.05  # eight exchanges do not tell steps apart that differ by less: then quality decides


@dataclass(frozen=True, slots=True)
class Budget:
    """Bits that a step may send; the same on every rank."""

    bits: float
    every: int = 1  # steps to an exchange, which has the bits of all of them
    is_chosen: bool = True  # else it is what is timed now

    def __post_init__(self) -> None:
        if not is_number(self.bits):
            raise ConfigError(f"bits={self.bits!r} is a {type(self.bits).__name__}: give a number, bits=0.75")
        if not 0 < self.bits < math.inf:
            raise ConfigError(f"bits are a budget a parameter and step, above 0, not {self.bits!r}")

    def __str__(self) -> str:
        """Return the arguments of `attach` that repeat it."""
        overlap = f", overlap={self.every}" if self.every > 1 else ""
        return f"bits={self.bits:g}, exchange=gradsieve.Steps(every={self.every}{overlap})"


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of an exchange of so many bits a parameter and step."""

    bits: float
    period: float
    exchange: float
    slack: float

    @property
    def waited(self) -> float:
        return max(0.0, self.exchange - self.slack)


def needed(world: int) -> float:
    """Bits with which so many ranks end level with dense."""
    return _quality(world)[0]


def _quality(world: int) -> tuple[float, float]:
    return next(((bits, fifth) for most, bits, fifth in _NEEDED if world <= most), _MORE_RANKS)


def choose(world: int, timed: Sequence[Timed], every: int = 1, may_wait: bool = True) -> Budget:
    """Choose of the needed bits or fewer what has the same loss soonest, by exchanges of LEAST bits and of
    the needed ones in a period of `every` steps; `may_wait`: periods may become longer."""
    little, much = timed
    bits, fifth = _quality(world)
    more = every * (bits - little.bits)
    a_bit = max(0.0, much.exchange - little.exchange) / more
    rounds = max(0.0, little.exchange - a_bit * every * little.bits)
    alone = max(little.period - little.waited, 1e-9) / every  # seconds of a step that waits for no exchange
    computed = max(0.0, much.period - much.waited - every * alone) / more  # for a bit, where ranks compute

    def seconds(choice: Budget) -> float:
        sent = choice.every * choice.bits
        hidden = little.slack + (choice.every - every) * alone
        waited = max(0.0, rounds + a_bit * sent - hidden) / choice.every
        step = alone + computed * max(0.0, choice.bits - little.bits) + waited
        return step * steps(choice)

    def steps(choice: Budget) -> float:
        longer = math.log(choice.every / every, 3)
        return float(fifth ** math.log(bits / choice.bits, 5) * _THREEFOLD**longer)

    halves = round(2 * math.log2(bits / LEAST))
    spent = [*(round(bits / 2 ** (half / 2), 2) for half in range(halves)), LEAST]
    periods = [period for period in _PERIODS if period > every] if may_wait else []
    choices = [Budget(some, period) for period in (every, *periods) for some in spent]
    soonest = min(map(seconds, choices))
    return min((choice for choice in choices if seconds(choice) <= _NEAR * soonest), key=steps)


class Timer:
    """Seconds of this rank's first exchanges, by the device's own clock: a host that runs ahead of its device
    waits for that and not for the exchange."""

    def __init__(self, world: int, every: int, may_wait: bool, device: torch.device) -> None:
        self.world, self.every, self.may_wait, self.device = world, every, may_wait, device
        self.restart()

    def restart(self, chosen: Budget | None = None) -> Budget:
        """Return what the next exchange may send: as it was chosen, or to be timed anew."""
        self.chosen, self.number = chosen, ALL if chosen else 0  # exchanges that were applied
        self._moments: dict[int, dict[str, Any]] = {}
        self._pending: dict[str, Any] = {}
        return self.budget

    @property
    def is_last(self) -> bool:
        """Whether all ranks are to gather their seconds in this exchange."""
        return self.number == ALL - 1

    def mark(self, what: str) -> None:
        """An exchange begins ("begun"), is needed or has come ("got"), in the stream of this thread."""
        if self.number >= ALL:
            return
        if what == "begun":
            self._moments[self.number] = self._pending = {}
        self._pending[what] = self.moment()  # it may be needed after it was applied, and counted

    def after(self) -> Budget:
        """Return what the next exchange may send, one more having been applied on all ranks."""
        self.number += 1
        return self.budget

    @property
    def budget(self) -> Budget:
        if self.chosen is not None and self.number >= ALL:
            return self.chosen
        bits = LEAST if self.number < LITTLE else needed(self.world)
        return Budget(bits, self.every, is_chosen=False)

    def gather(self) -> Program[None]:
        """Gather all ranks' seconds in the last exchange, and choose. The first of each kind is left out."""
        own = [*self._seconds(range(1, LITTLE)), *self._seconds(range(LITTLE + 1, ALL - 1))]
        every = yield AllGather(torch.tensor(own, dtype=torch.float64, device=self.device))
        ranks = every.view(-1, 2, 3).cpu()
        if not bool(((ranks >= 0) & (ranks < _LONGEST)).all()):
            raise Malformed(f"some rank took {ranks.tolist()} seconds: no clock shows that")
        # Ranks wait for the slowest one, which waits for none: its exchange is the shortest.
        periods, exchanges, slacks = ranks[..., 0].mean(0), ranks[..., 1].amin(0), ranks[..., 2].amax(0)
        figures = torch.stack([periods, exchanges, slacks], 1).tolist()
        timed = [Timed(bits, *each) for bits, each in zip((LEAST, needed(self.world)), figures, strict=True)]
        self.chosen = choose(self.world, timed, self.every, self.may_wait)

    def _seconds(self, numbers: range) -> list[float]:
        """Period, exchange and slack, each the median, of two the shorter one: a pause is no step."""
        laps = [(self._moments[number], self._moments[number + 1]["begun"]) for number in numbers]
        seconds = [
            (self._between(lap["begun"], end), *(self._between(lap["begun"], lap[to]) for to in _TO))
            for lap, end in laps
        ]
        return [max(0.0, statistics.median_low(each)) for each in zip(*seconds, strict=True)]

    def moment(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def _between(self, first: Any, then: Any) -> float:
        if isinstance(first, float):
            return float(then - first)
        then.synchronize()
        return 1e-3 * float(first.elapsed_time(then))


_TO = ("got", "needed")
