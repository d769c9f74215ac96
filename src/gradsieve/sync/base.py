"""THE pipeline: what happens to a unit in a step, for every scheme alike.

    accumulate -> select, exchange -> apply -> commit

`program` is one unit's way through it, a generator like the schemes themselves: it runs on a real process
group (`comm/c10d.py`) or on virtual ranks (`comm/lockstep.py`). What is accumulated and where the update
goes is told in `steps.py` and `gradients.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from gradsieve.comm.meter import Meter
from gradsieve.errors import ConfigError
from gradsieve.feedback.rider import carry
from gradsieve.feedback.treatment import Treatment
from gradsieve.feedback.units import Slot, lay_units
from gradsieve.schemes.base import Scheme
from gradsieve.types import Ctx, Outcome, Program, Result, Sparse

UNIT_CAP_MB = 100.0
"""Gradient in one unit of exchange. Larger than DDP's 25 MB: what travels is a small part of it, so that
rounds cost more than bytes; small enough for a large model's first units to go while backward still runs."""


@dataclass(slots=True)
class Stats:
    """The last step in figures."""

    meter: Meter
    seconds: dict[str, float] = field(default_factory=dict)
    sent: int = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Memory(Protocol):
    """What outlives a step, of one unit."""

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        """Flat views by kind and parameter."""
        ...


class Pipeline(ABC):
    """The state of one rank: units, memories, scheme state; and the programs that advance it."""

    exchanges_gradients: ClassVar[bool]
    """Whether `program` is given flat gradients or flat parameters."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        scheme: Scheme[Any],
        rank: int,
        world: int,
        bucket_cap_mb: float,
        treatment: Treatment,
    ) -> None:
        named = list(parameters)
        if not named:
            raise ConfigError("there is no parameter that requires a gradient")
        self.scheme, self.rank, self.world, self.treatment = scheme, rank, world, treatment
        small = 0 if scheme.lossless else treatment.small  # a lossless scheme sends all of it anyway
        self.units = lay_units(named, int(bucket_cap_mb * 2**20), small)
        self.states = [scheme.lay(unit.sizes, world) for unit in self.units]
        self.step = 0
        """Steps committed."""
        self.skipped = 0
        """Steps skipped because a gradient was not finite."""
        self.last_step_good = True
        self.stats = Stats(Meter(rank, world))
        self._scheme_now = scheme
        """At the density of this step."""

    @abstractmethod
    def program(self, index: int, tensors: Mapping[str, Tensor], everything: bool = False) -> Program[None]:
        """Exchange unit `index`. Units go in order; `everything` sends all of it, whatever the density."""

    def memories(self) -> dict[str, Tensor]:
        """What this rank remembers between steps, beside the scheme's states: views by kind/parameter."""
        return {
            f"{kind}/{name}": part
            for memory in self.remembering()
            for kind, parts in memory.by_kind().items()
            for name, part in parts.items()
        }

    @abstractmethod
    def remembering(self) -> Sequence[Memory]: ...

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Numbers that outlive a step and go into a checkpoint."""

    @abstractmethod
    def set_figures(self, figures: Mapping[str, float]) -> None: ...

    @property
    @abstractmethod
    def outcomes(self) -> list[Outcome[Any]]:
        """Of the last exchange, by unit."""

    @abstractmethod
    def waiting(self) -> list[Tensor]:
        """What this rank has not sent, by unit."""

    def exchange(
        self, index: int, acc: Tensor, rider: Tensor, stats: Stats, everything: bool
    ) -> Program[tuple[Outcome[Any], Tensor]]:
        """The scheme's own part, at the density of this step, with the rider."""
        ctx = Ctx(self.rank, self.world, self.step)
        state = self.states[index]
        density = 1.0 if everything else self.treatment.density_at(self.step, self.scheme.density)
        if density != self._scheme_now.density:
            self._scheme_now = replace(self.scheme, density=density)
        scheme = self._scheme_now
        exchange = scheme.exchange(acc, state, ctx) if self.units[index].n else _nothing(acc, state)
        outcome, ride = yield from _measured(carry(exchange, rider), stats)
        stats.sent += outcome.update.count
        return outcome, ride

    def settle(self, states: list[Any]) -> None:
        """The step was good on all ranks. One that sent everything told the scheme nothing."""
        scheme = self._scheme_now
        self.states = scheme.settle(states) if scheme.density < 1.0 or scheme.lossless else states
        self.step += 1


def _nothing(acc: Tensor, state: Any) -> Program[Outcome[Any]]:
    """The exchange of a unit whose tensors all go dense."""
    yield from ()
    return Outcome(Sparse.full(acc), Sparse.full(acc), state)


def _measured(program: Program[Result], stats: Stats) -> Program[Result]:
    """Count the ops; time spent waiting for replies is the exchange, the rest is the scheme's own."""
    reply: Tensor | None = None
    while True:
        with stats.stage("select"):
            try:
                op = program.send(reply)  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as end:
                result: Result = end.value
                return result
        stats.meter.count(op)
        with stats.stage("exchange"):
            reply = yield op


def by_slot(slots: tuple[Slot, ...], update: Sparse) -> Iterator[tuple[Slot, Tensor | None, Tensor]]:
    """The update in each slot, with indices relative to it."""
    if update.indices is None:
        for slot in slots:
            yield slot, None, update.values[slot.start : slot.stop]
        return
    edges = torch.tensor([slot.stop for slot in slots], device=update.indices.device)
    start = 0
    for slot, stop in zip(slots, torch.searchsorted(update.indices, edges).tolist(), strict=True):
        yield slot, update.indices[start:stop] - slot.start, update.values[start:stop]
        start = stop
