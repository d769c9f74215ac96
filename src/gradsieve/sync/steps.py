"""Exchange of steps: every rank's optimizer steps the rank's own model, and what it moved is exchanged.

    waiting      e = what this rank's steps moved and the others have not been told
    exchange     the scheme, while backward computes the next gradient; nothing that backward reads is written
    take over    shared model -= update / P;  e -= spent;  nor is anything here
    fold         own model = shared model - preview * e, where something was sent and by windows
    step         the optimizer, with this rank's own gradient

A gradient meets the others' news one step late, and its own rank's at once. A rank whose gradient is not
finite takes no step and has nothing new to tell; the others go on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm.meter import Meter
from gradsieve.feedback.coherence import Coherence, probe, squares
from gradsieve.feedback.local_steps import WINDOWS, LocalSteps
from gradsieve.feedback.treatment import Treatment
from gradsieve.feedback.units import flat_view
from gradsieve.kernels import is_finite
from gradsieve.schemes.base import Scheme
from gradsieve.sync.base import UNIT_CAP_MB, Memory, Pipeline, Stats
from gradsieve.types import Outcome, Program, Vector, to_host


@dataclass(frozen=True, slots=True)
class Staged:
    """What a unit's exchange gave."""

    outcome: Outcome[Any]
    dense_total: Tensor
    """Of the dense slots, summed over ranks; and this rank's part of it."""
    dense_spent: Tensor
    probes: Tensor


class StepPipeline(Pipeline):
    exchanges_gradients = False

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        scheme: Scheme[Any],
        rank: int,
        world: int,
        bucket_cap_mb: float = UNIT_CAP_MB,
        treatment: Treatment | None = None,
    ) -> None:
        named = dict(parameters)
        treatment = treatment or Treatment()
        super().__init__(named.items(), scheme, rank, world, bucket_cap_mb, treatment)
        self.own = {name: flat_view(parameter.data) for name, parameter in named.items()}
        """This rank's model, flat, by parameter. `.data`: version counters are raised by whoever knows
        which model the parameters hold (`integrations/two_models.py`)."""
        self.local = [LocalSteps(unit, self.own) for unit in self.units]
        self._staged: list[Staged] = []
        self._fresh = self.stats
        self.coherence = Coherence()
        self.preview = 1.0

    def program(
        self, index: int, tensors: Mapping[str, Tensor], everything: bool = False, call: int = 0
    ) -> Program[None]:
        """Exchange unit `index`, given flat parameters; they are written in `fold`, and only there."""
        if index == 0:
            self._staged = []
            self._fresh = Stats(Meter(self.rank, self.world))
        self.in_order(index, len(self._staged))
        stats = self._fresh
        with stats.timeline.stage("accumulate", index):
            waiting, dense, rider = self._offer(index, tensors)
        outcome, ride = yield from self.exchange(index, waiting, rider, stats, everything, call)
        self._staged.append(Staged(outcome, ride[: dense.numel()], dense, ride[dense.numel() :]))

    def offer(self, index: int) -> tuple[Vector, Tensor]:
        waiting, _, rider = self._offer(index, self.own)
        return waiting, rider

    def _offer(self, index: int, own: Mapping[str, Tensor]) -> tuple[Vector, Tensor, Tensor]:
        """What waits, that of dense slots, and the rider: these and the probes."""
        local = self.local[index]
        waiting, dense = local.waiting(own), local.waiting_dense(own)
        return waiting, dense, torch.cat([dense, probe(waiting, self.step)])

    def take_over(self, parameters: Mapping[str, Tensor]) -> bool:
        """Settle what the exchange gave, after the programs of all units; parameters are only read.

        A sum that overflowed is the same on all ranks, and they all leave it: it still waits. Then False.
        """
        stats = self.stats = self._fresh
        with stats.timeline.stage("apply"):
            seen = to_host(torch.stack([squares(staged.probes) for staged in self._staged]))
            sums = [part for staged in self._staged for part in (staged.dense_total, staged.probes)]
            good = is_finite(*sums, *(staged.outcome.update.values for staged in self._staged))
        if not good:
            self.skipped += 1
            return False
        self.coherence = self.coherence.after(seen, self.world)
        fixed = self.treatment.preview
        self.preview = self.coherence.preview(self.world) if fixed is None else fixed
        for index, (local, staged) in enumerate(zip(self.local, self._staged, strict=True)):
            update, spent = staged.outcome.update, staged.outcome.spent
            with stats.timeline.stage("apply", index):
                dense = staged.dense_total, staged.dense_spent
                local.settle(update, spent, *dense, parameters, self.world, self.step % WINDOWS)
        self.settle([staged.outcome.state for staged in self._staged])
        return True

    def fold(self, parameters: Mapping[str, Tensor], names: Set[str] | None = None) -> None:
        """Write this rank's model where that is due: in these parameters, or in all."""
        for index, local in enumerate(self.local):
            with self.stats.timeline.stage("commit", index):
                local.fold(parameters, self.preview, names)

    def finish(self, parameters: Mapping[str, Tensor]) -> bool:
        """Both, where no optimizer moves in between."""
        good = self.take_over(parameters)
        self.fold(parameters)
        return good

    def shown(self) -> dict[str, Tensor]:
        """The shared model, flat, by parameter, in the parameter's own type."""
        return {name: part for local in self.local for name, part in local.shown().items()}

    def adopt(self, names: Set[str]) -> None:
        """The shared model was replaced in these parameters, alike on all ranks."""
        for local in self.local:
            local.adopt(self.own, names)

    def write_shared(self, name: str, values: Tensor) -> None:
        """The user wrote to a parameter while it held the shared model."""
        for local in self.local:
            local.write_shared(name, values)

    def renew(self) -> None:
        for local in self.local:
            local.renew()

    def figures(self) -> dict[str, float]:
        return {"preview": self.preview, "alike": self.coherence.alike, "all": self.coherence.all}

    def set_figures(self, figures: Mapping[str, float]) -> None:
        self.coherence = Coherence(figures["alike"], figures["all"])
        self.preview = figures["preview"]

    @property
    def outcomes(self) -> list[Outcome[Any]]:
        return [staged.outcome for staged in self._staged]

    def waiting(self) -> Iterator[Tensor]:
        return (local.waiting(self.own).between(0, local.unit.n) for local in self.local)

    def waiting_norm(self) -> float:
        """Of all that waits, dense slots included."""
        dense = (local.waiting_dense(self.own) for local in self.local)
        return math.hypot(*(float(part.norm()) for part in (*dense, *self.waiting())))

    def remembering(self) -> Sequence[Memory]:
        return self.local
