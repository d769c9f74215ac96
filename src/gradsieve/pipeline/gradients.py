"""Exchange of gradients: the optimizer is given the mean of what all ranks sent.

    unit -> accumulate -> select, exchange -> apply -> commit
            acc = e + g   the scheme          g = update / P    e = acc - spent

Nothing that outlives the step is changed before the last unit's program knows that every rank's step is good;
then all of it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm.ops import AllReduce, Meter
from gradsieve.feedback.residual import Residual
from gradsieve.feedback.units import Unit, by_slot, parts_of
from gradsieve.kernels import is_finite
from gradsieve.pipeline.base import UNIT_CAP_MB, Memory, Pipeline, Stats
from gradsieve.pipeline.exchange_settings import Gradients
from gradsieve.schemes.base import Scheme
from gradsieve.types import Outcome, Program, Sparse

PLAIN = Gradients()


@dataclass(slots=True)
class Staged:
    """What a unit's exchange gave, waiting for the verdict on the whole step."""

    outcome: Outcome[Any]
    good: bool


class GradientPipeline(Pipeline):
    exchanges_steps = False
    settings: Gradients

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        scheme: Scheme[Any],
        rank: int,
        world: int,
        bucket_cap_mb: float = UNIT_CAP_MB,
        settings: Gradients = PLAIN,
    ) -> None:
        super().__init__(parameters, scheme, rank, world, bucket_cap_mb, settings)
        self.residuals = [] if scheme.lossless else [Residual(unit) for unit in self.units]
        self.loss_scale = self.residual_scale = 1.0
        """What gradients are multiplied by in this step, and were when the residuals were stored."""
        self.may_have_unused = False
        """DDP with unused parameters: an update to one that no rank used would be dropped, so keep it."""
        self._staged: list[Staged] = []
        self._usable = True
        """Whether this rank's own gradient was finite, in the units so far."""
        self._fresh = self.stats

    def program(
        self, index: int, tensors: Mapping[str, Tensor], everything: bool = False, call: int = 0
    ) -> Program[None]:
        """Exchange unit `index`; flat gradients by parameter name are overwritten with the mean update.

        Units go in order: the first opens a step, the last one decides on it.
        """
        unit, gradients = self.units[index], tensors
        if index == 0:
            self._staged, self._usable = [], True
            self._fresh = Stats(Meter(self.rank, self.world))
        self.in_order(index, len(self._staged))
        stats = self._fresh
        with stats.timeline.stage("accumulate", index):
            acc, good = self._accumulate(index, gradients)
            self._usable &= good
            piggyback = self._piggyback(unit, gradients, good)
        outcome, ride = yield from self.exchange(index, acc, piggyback, stats, everything, call)
        with stats.timeline.stage("apply", index):
            if self.may_have_unused and not self.scheme.lossless:
                outcome = _only_used(outcome, unit, ride)
            update = outcome.update
            good = (is_finite(update.bounds(), ride) or is_finite(update.values, ride)) and not int(ride[-1])
            good &= self._apply(unit, gradients, update, ride)
        self._staged.append(Staged(outcome, good))
        if index == len(self.units) - 1:
            with stats.timeline.stage("commit"):
                self._decide(gradients)

    def note_loss_scale(self, scale: float) -> None:
        self.loss_scale = scale

    def offer(self, index: int) -> tuple[Tensor, Tensor]:
        unit = self.units[index]
        nothing = torch.zeros(unit.n, dtype=unit.dtype, device=unit.device)
        return nothing, self._piggyback(unit, {}, good=False)

    def _accumulate(self, index: int, gradients: Mapping[str, Tensor]) -> tuple[Tensor, bool]:
        """acc = e + g, and whether this rank's gradient is finite; where it is not, acc = e."""
        unit = self.units[index]
        if self.scheme.lossless:
            acc = torch.cat([gradients[slot.name].to(unit.dtype) for slot in unit.slots])
            return acc, is_finite(acc)
        scale = self.loss_scale / self.residual_scale
        acc, good = self.residuals[index].accumulate(gradients, scale)
        if good and is_finite(*(gradients[slot.name] for slot in unit.dense)):
            return acc, True
        return self.residuals[index].without_gradient(), False

    def _piggyback(self, unit: Unit, gradients: Mapping[str, Tensor], good: bool) -> Tensor:
        """Dense slots, then one flag for each sparse slot this rank used, then the vote."""
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
        for slot in unit.sparse:
            if update.indices is not None or slot.start < update.start or slot.stop > update.stop:
                gradients[slot.name].zero_()
        sparse = chain.from_iterable(by_slot(unit.sparse, part) for part in update.parts())
        for slot, where, values in chain(by_slot(unit.dense, Sparse.full(ride)), sparse):
            gradient = gradients[slot.name]
            mean = (values / self.world).to(gradient.dtype)
            good &= gradient.dtype == unit.dtype or is_finite(mean)
            gradient[where] = mean
        return good

    def _decide(self, gradients: Mapping[str, Tensor]) -> None:
        """Commit the step on every rank, or on none: all ranks saw the same votes."""
        self.last_step_good = all(staged.good for staged in self._staged)
        self.stats = self._fresh
        self.idle = 0 if self._usable else self.idle + 1
        if not self.last_step_good:
            self.skipped += 1
            for gradient in gradients.values():
                gradient.fill_(torch.nan)  # a GradScaler must see it, on every rank
            return
        for residual, staged in zip(self.residuals, self._staged, strict=False):
            residual.commit(staged.outcome.spent)  # e = acc - spent
        self.residual_scale = self.loss_scale
        self.apply([staged.outcome.state for staged in self._staged])

    def drain(self) -> Program[dict[str, Tensor]]:
        """Empties the residuals of all ranks, once the last of them was summed: their mean by
        parameter."""
        means: dict[str, Tensor] = {}
        for residual in self.residuals:
            total = yield AllReduce(residual.kept.clone())
            means |= parts_of(total / (self.world * self.residual_scale), residual.unit.sparse)
        for residual in self.residuals:
            residual.kept.zero_()
        self.last_step_good = True
        return means

    def figures(self) -> dict[str, float]:
        return {"residual_scale": self.residual_scale}

    def set_figures(self, figures: Mapping[str, float]) -> None:
        self.residual_scale = figures["residual_scale"]

    @property
    def outcomes(self) -> list[Outcome[Any]]:
        return [staged.outcome for staged in self._staged]

    def waiting(self) -> Iterator[Tensor]:
        return (residual.kept for residual in self.residuals)

    def remembering(self) -> Sequence[Memory]:
        return self.residuals


def _only_used(outcome: Outcome[Any], unit: Unit, ride: Tensor) -> Outcome[Any]:
    """Take back what would land in a parameter that no rank used in this step: DDP drops it there."""
    marks = ride[-1 - len(unit.sparse) : -1] > 0
    if bool(marks.all()) or outcome.update.count == outcome.update.numel:
        return outcome
    edges = torch.tensor([slot.stop for slot in unit.sparse], dtype=torch.int64, device=marks.device)

    def kept(part: Sparse) -> Sparse:
        indices = part.listed()
        keep = marks[torch.searchsorted(edges, indices, right=True)]
        return Sparse(indices[keep], part.values[keep], part.numel)

    return Outcome(kept(outcome.update), kept(outcome.spent), outcome.state)
