"""Exchange of steps: every rank's optimizer steps the rank's own model, and what it moved is exchanged.

    waiting      e = what this rank's steps moved and the others have not been told
    exchange     the scheme, while backward computes the next gradient; nothing that backward reads is written
    finish       shared model -= update / P;  e -= spent;  own model = shared model - preview * e, by windows
    step         the optimizer, with this rank's own gradient

A gradient meets the others' news one step late, and its own rank's at once. A rank whose gradient is not
finite takes no step and has nothing new to tell; the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm.meter import Meter
from gradsieve.errors import GradsieveError
from gradsieve.feedback.coherence import Coherence, probe, squares
from gradsieve.feedback.local_steps import WINDOWS, LocalSteps
from gradsieve.feedback.treatment import Treatment
from gradsieve.feedback.units import flat_view
from gradsieve.kernels import is_finite
from gradsieve.schemes.base import Scheme
from gradsieve.sync.base import UNIT_CAP_MB, Memory, Pipeline, Stats
from gradsieve.types import Outcome, Program, to_host


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
        flat = {name: flat_view(parameter.detach()) for name, parameter in named.items()}
        self._parameters = flat
        self.local = [LocalSteps(unit, flat) for unit in self.units]
        self._staged: list[tuple[Outcome[Any], Tensor]] = []
        self._fresh = self.stats
        self.coherence = Coherence()
        self.preview = 1.0

    def program(self, index: int, tensors: Mapping[str, Tensor], everything: bool = False) -> Program[None]:
        """Exchange unit `index`, given flat parameters; they are written in `finish`, and only there."""
        if index == 0:
            self._staged = []
            self._fresh = Stats(Meter(self.rank, self.world))
        if len(self._staged) != index:
            raise GradsieveError(f"rank {self.rank}: an earlier unit of this step has failed")
        stats, local = self._fresh, self.local[index]
        waiting = local.waiting(tensors)
        with stats.timeline.stage("accumulate", index):
            rider = torch.cat([local.waiting_dense(tensors), probe(waiting, self.step)])
        outcome, ride = yield from self.exchange(index, waiting, rider, stats, everything)
        self._staged.append((outcome, ride))

    def finish(self, parameters: Mapping[str, Tensor]) -> None:
        """Write what the exchange gave, after the programs of all units.

        A sum that overflowed is the same on all ranks, and they all leave it: it still waits.
        """
        stats = self.stats = self._fresh
        with stats.timeline.stage("apply"):
            dense = [local.shared_dense.numel() for local in self.local]
            rides = [ride for _, ride in self._staged]
            probes = [ride[length:] for ride, length in zip(rides, dense, strict=True)]
            seen = to_host(torch.stack([squares(probe) for probe in probes]))
            good = is_finite(*rides, *(outcome.update.values for outcome, _ in self._staged))
        if not good:
            self.skipped += 1
            return
        self.coherence = self.coherence.after(seen, self.world)
        fixed = self.treatment.preview
        self.preview = self.coherence.preview(self.world) if fixed is None else fixed
        for index, (outcome, ride) in enumerate(self._staged):
            local = self.local[index]
            with stats.timeline.stage("apply", index):
                mean = ride[: dense[index]] / self.world
                local.settle(outcome.update, outcome.spent, mean, parameters, self.world, self.preview)
            with stats.timeline.stage("commit", index):
                local.fold(parameters, self.preview, self.step % WINDOWS)
        self.settle([outcome.state for outcome, _ in self._staged])

    def figures(self) -> dict[str, float]:
        return {"preview": self.preview, "alike": self.coherence.alike, "all": self.coherence.all}

    def set_figures(self, figures: Mapping[str, float]) -> None:
        self.coherence = Coherence(figures["alike"], figures["all"])
        self.preview = figures["preview"]

    @property
    def outcomes(self) -> list[Outcome[Any]]:
        return [outcome for outcome, _ in self._staged]

    def waiting(self) -> Iterator[Tensor]:
        return (local.waiting(self._parameters).between(0, local.unit.n) for local in self.local)

    def remembering(self) -> Sequence[Memory]:
        return self.local
