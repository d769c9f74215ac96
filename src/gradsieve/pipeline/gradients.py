"""Exchange of gradients: the optimizer is given the mean of what all ranks sent.

    unit -> accumulate -> select, exchange -> apply -> commit
            acc = e + g   the scheme          g = update / P    e = acc - spent

Nothing that outlives the step is changed before the last unit's program knows that every rank's step is good;
then all of it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsieve.kernels import accumulate, is_finite
from gradsieve.pipeline.base import FLUSH, MakeModels, Pending, Pipeline
from gradsieve.pipeline.exchange_settings import Gradients
from gradsieve.types import Outcome, Program, Sparse
from gradsieve.units import Unit, by_slot, flat_view, parts_of


class Residual:
    """The residual of one unit. Accumulation writes to a second buffer and commit swaps the
    two: a step which fails or is skipped leaves the residual as it was, bit for bit. 2 n elements."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.kept = torch.zeros(unit.n, dtype=unit.dtype, device=unit.device)
        self._staged = torch.empty_like(self.kept)

    def accumulate(self, gradients: Mapping[str, Tensor], scale: float = 1.0) -> tuple[Tensor, bool]:
        """Return acc = scale e + g, where `scale` takes the residual to the units of the gradient; and
        whether it is finite."""
        good = True
        for slot in self.unit.slots:
            here = slice(slot.start, slot.stop)
            good &= accumulate(self.kept[here], gradients[slot.name], scale, self._staged[here])
        return self._staged, good

    def without_gradient(self) -> Tensor:
        """Return acc = e, if this rank's gradient cannot be used."""
        return self._staged.copy_(self.kept)

    def commit(self, spent: Sparse) -> None:
        """e = acc - spent."""
        spent.subtract_from(self._staged)
        self.kept, self._staged = self._staged, self.kept


@dataclass(slots=True)
class Result:
    """The outcome of a unit's exchange, until the votes of the whole step are known."""

    outcome: Outcome[Any]
    usable: bool  # whether this rank's own gradient was finite
    good: bool  # whether all ranks' were, and the sum


class GradientPipeline(Pipeline):
    exchanges_steps = False
    settings: Gradients

    def set_up(self, models: MakeModels) -> None:
        self._residuals = [] if self.scheme.lossless else [Residual(unit) for unit in self.selected]
        # What gradients are multiplied by in this step, and were when the residuals were stored.
        self.loss_scale = self.residual_scale = 1.0
        self._keeps_unused = False

    def note_loss_scale(self, scale: float) -> None:
        self.loss_scale = scale

    def keep_unused(self) -> None:
        self._keeps_unused = True

    def offers(self, call: str, gradients: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """Return flat gradients by name, which are overwritten with the mean update. A flush gives the
        residuals alone, unscaled."""
        if gradients is not None:
            return gradients
        if call == FLUSH:
            self.loss_scale = 1.0
            for parameter in self.parameters.values():
                parameter.grad = None
        return {name: flat_view(_gradient_of(p)) for name, p in self.parameters.items()}

    def program(self, pending: Pending, index: int) -> Program[None]:
        """Exchange unit `index`. Units go in order: the last one decides on the step."""
        self.check_order(pending, index)
        unit, gradients, timeline = self.units[index], pending.offers, pending.stats.timeline
        marks_used = self._keeps_unused and index < len(self._residuals)
        with timeline.stage("accumulate", index):
            acc, usable = self._accumulate(index, gradients)
            piggyback = self._piggyback(unit, gradients if usable else None, marks_used)
        outcome, total = yield from self.exchange(pending, index, acc, piggyback, pending.is_flush)
        with timeline.stage("apply", index):
            if marks_used:
                outcome = _only_used(outcome, unit, total)
            update = outcome.update
            good = is_finite(update.bounds(), total) or is_finite(update.values, total)
            good = good and not int(total[-1])
            good &= self._apply(unit, gradients, update)
        pending.results.append(Result(outcome, usable, good))
        if index == len(self.units) - 1:
            with timeline.stage("commit"):
                self._decide(pending)

    def complete(self, pending: Pending) -> bool:
        return self.last_step_good

    def probe_offer(self) -> tuple[Tensor, Tensor]:
        unit = self.units[0]
        nothing = torch.zeros(unit.n, dtype=unit.dtype, device=unit.device)
        return nothing, self._piggyback(unit, None, self._keeps_unused and bool(self._residuals))

    def _accumulate(self, index: int, gradients: Mapping[str, Tensor]) -> tuple[Tensor, bool]:
        """Return acc = e + g, and whether this rank's gradient is finite; if it is not, acc = e."""
        unit = self.units[index]
        if index >= len(self._residuals):
            acc = torch.cat([gradients[slot.name].to(unit.dtype) for slot in unit.slots])
            return acc, is_finite(acc)
        residual = self._residuals[index]
        acc, good = residual.accumulate(gradients, self.loss_scale / self.residual_scale)
        return (acc, True) if good else (residual.without_gradient(), False)

    def _piggyback(self, unit: Unit, gradients: Mapping[str, Tensor] | None, marks_used: bool) -> Tensor:
        """Return one flag for each parameter that this rank used, if they are asked for; then the vote.
        Without gradients, those of this rank cannot be used."""
        vote = torch.tensor([float(gradients is None)], dtype=unit.dtype, device=unit.device)
        if gradients is None:
            return torch.cat([vote.new_zeros(marks_used * len(unit.slots)), vote])
        used = [gradients[slot.name] for slot in unit.slots] if marks_used else []
        return torch.cat([*(gradient.count_nonzero().to(unit.dtype)[None] for gradient in used), vote])

    def _apply(self, unit: Unit, gradients: Mapping[str, Tensor], update: Sparse) -> bool:
        """g = update / P; False if a gradient's narrower type cannot hold it (on all ranks alike)."""
        good = True
        for slot in unit.slots:
            if update.indices is not None or slot.start < update.start or slot.stop > update.stop:
                gradients[slot.name].zero_()
        for part in update.parts():
            for slot, where, values in by_slot(unit.slots, part):
                gradient = gradients[slot.name]
                mean = (values / self.world).to(gradient.dtype)
                good &= gradient.dtype == unit.dtype or is_finite(mean)
                gradient[where] = mean
        return good

    def _decide(self, pending: Pending) -> None:
        """Commit the step on every rank, or on none: all ranks saw the same votes."""
        self.last_step_good = all(result.good for result in pending.results)
        self.last = pending
        self.idle = 0 if all(result.usable for result in pending.results) else self.idle + 1
        if not self.last_step_good:
            self.skipped += 1
            for gradient in pending.offers.values():
                gradient.fill_(torch.nan)  # a GradScaler must see it, on every rank
        else:
            for residual, result in zip(self._residuals, pending.results, strict=False):
                residual.commit(result.outcome.spent)
            self.residual_scale = self.loss_scale
            self.commit(pending)
        pending.offers = None

    # -- state ------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        return {"residual_scale": self.residual_scale}

    def set_figures(self, figures: Mapping[str, float]) -> None:
        self.residual_scale = figures["residual_scale"]

    def memories(self) -> dict[str, Tensor]:
        return {
            f"residual/{name}": part
            for residual in self._residuals
            for name, part in parts_of(residual.kept, residual.unit.slots).items()
        }

    def replicated(self) -> tuple[dict[str, Tensor], list[float]]:
        return dict(self.parameters), []

    def residuals(self) -> Iterator[Tensor]:
        return (residual.kept for residual in self._residuals)


def _gradient_of(parameter: Tensor) -> Tensor:
    """Return `.grad`, made to lie in memory as the parameter does."""
    gradient = parameter.grad
    if gradient is None:
        parameter.grad = gradient = torch.zeros_like(parameter)
    if gradient.stride() != parameter.stride():
        parameter.grad = gradient = torch.empty_like(parameter).copy_(gradient)
    return gradient


def _only_used(outcome: Outcome[Any], unit: Unit, total: Tensor) -> Outcome[Any]:
    """Take back what would land in a parameter that no rank used in this step: DDP drops it there."""
    marks = total[-1 - len(unit.slots) : -1] > 0
    if bool(marks.all()) or outcome.update.count == outcome.update.numel:
        return outcome
    edges = torch.tensor([slot.stop for slot in unit.slots], dtype=torch.int64, device=marks.device)

    def kept(part: Sparse) -> Sparse:
        indices = part.listed()
        keep = marks[torch.searchsorted(edges, indices, right=True)]
        return Sparse(indices[keep], part.values[keep], part.numel)

    return Outcome(kept(outcome.update), kept(outcome.spent), outcome.state)
