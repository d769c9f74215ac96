"""THE pipeline: what happens to a gradient, for every scheme alike.

    unit -> accumulate -> select, exchange -> apply -> commit
            acc = e + g   the scheme          g = update / P    e = acc - spent

`Pipeline.program` is one unit's way through it, a generator like the schemes themselves: it runs on a real
process group (`comm/c10d.py`) or on virtual ranks (`comm/lockstep.py`). Nothing that outlives the step is
changed before the last unit's program knows that every rank's step is good; then all of it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm.meter import Meter
from gradsieve.errors import ConfigError
from gradsieve.feedback.residual import Residual
from gradsieve.feedback.rider import carry
from gradsieve.feedback.units import Slot, Unit, lay_units
from gradsieve.kernels import is_finite
from gradsieve.schemes.base import Scheme
from gradsieve.types import Ctx, Outcome, Program, Result, Sparse

UNIT_CAP_MB = 100.0
"""Gradient in one unit of exchange. Larger than DDP's 25 MB: what travels is a small part of it, so that
rounds cost more than bytes; small enough for a large model's first units to go while backward still runs."""


@dataclass(slots=True)
class Staged:
    """What a unit's exchange gave, waiting for the verdict on the whole step."""

    outcome: Outcome[Any]
    good: bool


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


class Pipeline:
    """The state of one rank: units, residuals, scheme state; and the programs that advance it."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        scheme: Scheme[Any],
        rank: int,
        world: int,
        bucket_cap_mb: float = UNIT_CAP_MB,
    ) -> None:
        named = list(parameters)
        if not named:
            raise ConfigError("there is no parameter that requires a gradient")
        self.scheme, self.rank, self.world = scheme, rank, world
        self.units = lay_units(named, int(bucket_cap_mb * 2**20), all_sparse=scheme.lossless)
        self.residuals = [] if scheme.lossless else [Residual(unit) for unit in self.units]
        self.states = [scheme.lay(unit.sizes, world) for unit in self.units]
        self.step = 0
        """Steps committed."""
        self.skipped = 0
        """Steps skipped because some rank's gradient was not finite."""
        self.last_step_good = True
        self.loss_scale = self.residual_scale = 1.0
        """What gradients are multiplied by in this step, and were when the residuals were stored."""
        self.may_have_unused = False
        """DDP with unused parameters: an update to one that no rank used would be dropped, so keep it."""
        self._staged: list[Staged] = []
        self._fresh = self.stats = Stats(Meter(rank, world))

    def program(self, index: int, gradients: Mapping[str, Tensor]) -> Program[None]:
        """Exchange unit `index`; flat `gradients` by parameter name are overwritten with the mean update.

        Units go in order: the first opens a step, the last one decides on it.
        """
        unit = self.units[index]
        if index == 0:
            self._staged = []
            self._fresh = Stats(Meter(self.rank, self.world))
        stats = self._fresh
        with stats.stage("accumulate"):
            acc, good = self._accumulate(index, gradients)
            rider = self._rider(unit, gradients, good)
        ctx = Ctx(self.rank, self.world, self.step)
        state = self.states[index]
        exchange = self.scheme.exchange(acc, state, ctx) if unit.n else _nothing(acc, state)
        outcome, ride = yield from _measured(carry(exchange, rider), stats)
        with stats.stage("apply"):
            if self.may_have_unused and not self.scheme.lossless:
                outcome = _only_used(outcome, unit, ride)
            good = is_finite(outcome.update.values) and is_finite(ride) and not int(ride[-1])
            good &= self._apply(unit, gradients, outcome.update, ride)
            stats.sent += outcome.update.count
        self._staged.append(Staged(outcome, good))
        if index == len(self.units) - 1:
            with stats.stage("commit"):
                self._decide(gradients)

    def _accumulate(self, index: int, gradients: Mapping[str, Tensor]) -> tuple[Tensor, bool]:
        """acc = e + g, and whether this rank's gradient is finite; where it is not, acc = e."""
        unit = self.units[index]
        if self.scheme.lossless:
            acc = torch.cat([gradients[slot.name].to(unit.dtype) for slot in unit.slots])
            return acc, is_finite(acc)
        acc = self.residuals[index].accumulate(gradients, self.loss_scale / self.residual_scale)
        if is_finite(acc) and all(is_finite(gradients[slot.name]) for slot in unit.dense):
            return acc, True
        return self.residuals[index].without_gradient(), False

    def _rider(self, unit: Unit, gradients: Mapping[str, Tensor], good: bool) -> Tensor:
        """Dense slots, then one mark for each sparse slot this rank used, then the vote."""
        vote = torch.tensor([0.0 if good else 1.0], dtype=unit.dtype, device=unit.device)
        if not good:
            length = sum(slot.numel for slot in unit.dense) + self.may_have_unused * len(unit.sparse)
            return torch.cat([vote.new_zeros(length), vote])
        parts = [gradients[slot.name].to(unit.dtype) for slot in unit.dense]
        if self.may_have_unused:
            parts += [gradients[slot.name].count_nonzero().to(unit.dtype)[None] for slot in unit.sparse]
        return torch.cat([*parts, vote])

    def _apply(self, unit: Unit, gradients: Mapping[str, Tensor], update: Sparse, ride: Tensor) -> bool:
        """g = update / P; False where a gradient's narrower type cannot hold it (on all ranks alike)."""
        good = True
        dense = Sparse.full(ride)
        for slot, indices, values in [*_by_slot(unit.dense, dense), *_by_slot(unit.sparse, update)]:
            gradient = gradients[slot.name]
            mean = (values / self.world).to(gradient.dtype)
            good &= gradient.dtype == unit.dtype or is_finite(mean)
            if indices is None:
                gradient.copy_(mean)
            else:
                gradient.zero_()
                gradient[indices] = mean
        return good

    def _decide(self, gradients: Mapping[str, Tensor]) -> None:
        """Commit the step on every rank, or on none: all ranks saw the same votes."""
        self.last_step_good = all(staged.good for staged in self._staged)
        self.stats = self._fresh
        if not self.last_step_good:
            self.skipped += 1
            for gradient in gradients.values():
                gradient.fill_(torch.nan)  # a GradScaler must see it, on every rank
            return
        for residual, staged in zip(self.residuals, self._staged, strict=False):
            residual.commit(staged.outcome.spent)  # e = acc - spent
        self.residual_scale = self.loss_scale
        self.states = self.scheme.settle([staged.outcome.state for staged in self._staged])
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


def _by_slot(slots: tuple[Slot, ...], update: Sparse) -> Iterator[tuple[Slot, Tensor | None, Tensor]]:
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


def _only_used(outcome: Outcome[Any], unit: Unit, ride: Tensor) -> Outcome[Any]:
    """Take back what would land in a parameter that no rank used in this step: DDP drops it there."""
    marks = ride[-1 - len(unit.sparse) : -1] > 0
    if bool(marks.all()) or outcome.update.indices is None:
        return outcome
    edges = torch.tensor([slot.stop for slot in unit.sparse], device=marks.device)

    def kept(part: Sparse) -> Sparse:
        assert part.indices is not None
        keep = marks[torch.searchsorted(edges, part.indices, right=True)]
        return Sparse(part.indices[keep], part.values[keep], part.numel)

    return Outcome(kept(outcome.update), kept(outcome.spent), outcome.state)
