"""P virtual ranks that train under a treatment, and the laws of treatments.

Each law is a function that raises AssertionError where it is broken (see `test_exchanges_can_fail.py`).
Numbers are whole, times a power of two: where the number of ranks is a power of two as well, laws hold to the
last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.models import WINDOWS, Models
from gradsieve.pipeline import Pending, Pipeline, StepPipeline
from gradsieve.pipeline.exchange_settings import Gradients, Steps
from gradsieve.pipeline.gradients import GradientPipeline
from gradsieve.schemes import make
from gradsieve.schemes.base import Scheme
from gradsieve.testing.laws import same_bits, same_state
from gradsieve.units import flat_view, parts_of
from laws.cases import WORLDS
from previews import fix_preview

UNIT = 2.0**-6
SMALL = 6
"""Tensors below this many elements go dense here."""

STEPS: dict[str, tuple[Steps, float | None]] = {
    "measured": (Steps(small=SMALL), None),
    "whole": (Steps(small=SMALL), 1.0),
    "half": (Steps(small=SMALL), 0.5),
    "hidden": (Steps(small=SMALL), 0.0),
    "all sparse": (Steps(small=0), None),
}
"""Settings, and the preview where it is not measured."""
GRADIENTS = {"plain": Gradients(small=SMALL), "all sparse": Gradients(small=0)}


@dataclass(frozen=True)
class Case:
    world: int = 4
    n: int = 41
    density: float = 0.1
    steps: int = 5
    seed: int = 0
    cap_mb: float = 25.0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"first": (3, 7), "bias": (5,), "last": (1, self.n)}

    @property
    def exact(self) -> bool:
        return self.world & (self.world - 1) == 0

    def numbers(self, step: int, rank: int) -> dict[str, Tensor]:
        """Whole numbers times UNIT, flat, by parameter."""
        source = torch.Generator().manual_seed((self.seed * 1009 + step) * 1009 + rank)
        draws = {
            name: torch.randint(-8, 9, (prod(shape),), device="cpu", generator=source)
            for name, shape in self.shapes.items()
        }
        return {name: draw.float() * UNIT for name, draw in draws.items()}

    def model(self) -> dict[str, Tensor]:
        return {name: part.view(self.shapes[name]) for name, part in self.numbers(10_000, 0).items()}


@st.composite
def cases(draw: st.DrawFn, *, worlds: Sequence[int] = tuple(WORLDS)) -> Case:
    return Case(
        world=draw(st.sampled_from(worlds)),
        n=2 * draw(st.integers(0, 60)) + 1,
        density=draw(st.sampled_from([0.01, 0.1, 0.3, 0.9])),
        steps=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 1000)),
        cap_mb=draw(st.sampled_from([1e-6, 25.0])),
    )


class Ranks:
    """What both kinds of training have in common."""

    pipelines: Sequence[Pipeline]

    def begin(self, call: str = "training", gradients: Sequence[Mapping[str, Tensor]] = ()) -> list[Pending]:
        given = gradients or [None] * len(self.pipelines)
        return [
            pipeline.begin(call, gradients=own) for pipeline, own in zip(self.pipelines, given, strict=True)
        ]

    def carry(self, begun: Sequence[Pending]) -> Sequence[Pending]:
        for index in range(len(self.pipelines[0].units)):
            lockstep.run(
                [
                    pipeline.program(pending, index)
                    for pipeline, pending in zip(self.pipelines, begun, strict=True)
                ]
            )
        return begun

    def memories(self) -> list[dict[str, Tensor]]:
        return [
            {key: part.clone() for key, part in pipeline.memories().items()} for pipeline in self.pipelines
        ]


def total(memories: Sequence[Mapping[str, Tensor]], key: str) -> Tensor:
    """Over all ranks; nothing where that parameter has no such memory."""
    parts = [own[key] for own in memories if key in own]
    return torch.stack(parts).double().sum(0) if parts else torch.zeros(1, dtype=torch.float64)


class Stepping(Ranks):
    """Every rank has a model of its own; what its steps moved is exchanged."""

    def __init__(
        self, case: Case, scheme: str | Scheme[Any], settings: Steps, preview: float | None = None
    ) -> None:
        self.case, self.world = case, case.world
        scheme = make(scheme, case.density) if isinstance(scheme, str) else scheme
        self.models = [case.model() for _ in range(case.world)]
        self.pipelines = [
            StepPipeline(model, (), scheme, settings, rank, case.world, case.cap_mb, Models)
            for rank, model in enumerate(self.models)
        ]
        for pipeline in self.pipelines:
            fix_preview(pipeline, preview)
        self.flat = [{name: flat_view(p) for name, p in model.items()} for model in self.models]
        self.owed = {name: case.world * p.double() for name, p in self.flat[0].items()}
        """P times the first model, less all that the optimizers of all ranks moved."""

    def move(self, rank: int, step: Mapping[str, Tensor]) -> None:
        for name, parameter in self.flat[rank].items():
            before = parameter.clone()
            parameter -= step[name]
            self.owed[name] -= before.double() - parameter.double()

    def exchange(self, everything: bool = False) -> None:
        begun = self.carry(self.begin("flush()" if everything else "training"))
        for pipeline, pending in zip(self.pipelines, begun, strict=True):
            pipeline.finish(pending)

    def advance(self, step: int, idle: Sequence[int] = ()) -> None:
        for rank in range(self.world):
            if rank not in idle:
                self.move(rank, self.case.numbers(step, rank))
        self.exchange()


class Receiving(Ranks):
    """Gradients are exchanged; all ranks have one model, which stays as it is."""

    def __init__(
        self,
        case: Case,
        scheme: str | Scheme[Any],
        settings: Gradients,
    ) -> None:
        self.case, self.world = case, case.world
        scheme = make(scheme, case.density) if isinstance(scheme, str) else scheme
        self.model = case.model()
        self.pipelines = [
            GradientPipeline(self.model, (), scheme, settings, rank, case.world, case.cap_mb)
            for rank in range(case.world)
        ]

    def advance(self, step: int) -> list[dict[str, Tensor]]:
        return self.give([self.case.numbers(step, rank) for rank in range(self.world)])

    def give(self, gradients: list[dict[str, Tensor]], everything: bool = False) -> list[dict[str, Tensor]]:
        """What the optimizer of each rank is given instead."""
        self.carry(self.begin("flush()" if everything else "training", gradients))
        return gradients


# -- laws of steps --------------------------------------------------------------------------------------


def check_shared(ranks: Stepping) -> None:
    """The shared model and the preview are the same bits on every rank."""
    first = shared_of(ranks.pipelines[0])
    for rank, pipeline in enumerate(ranks.pipelines):
        assert same_bits(shared_of(pipeline), first), f"rank {rank} shares another model than rank 0"
        assert same_bits(pipeline.coherence, ranks.pipelines[0].coherence), f"rank {rank}: another coherence"
        assert all(map(same_state, pipeline.states, ranks.pipelines[0].states)), f"rank {rank}: another state"


def shared_of(pipeline: StepPipeline) -> list[Tensor]:
    return [part for key, part in pipeline.memories().items() if key.startswith("shared/")]


def waiting_of(ranks: Stepping, rank: int) -> dict[str, Tensor]:
    """What waits on a rank, by parameter."""
    pipeline, out = ranks.pipelines[rank], {}
    for unit, e in zip(pipeline.units, pipeline.residuals(), strict=True):
        out |= parts_of(e, unit.slots)
    return out


def check_steps_conserved(ranks: Stepping, exact: bool) -> None:
    """P w - sum of e == P w at first - all that the optimizers moved."""
    shared = ranks.memories()[0]
    waiting = [waiting_of(ranks, rank) for rank in range(ranks.world)]
    for name, owed in ranks.owed.items():
        held = ranks.world * shared[f"shared/{name}"].double() - total(waiting, name)
        room = 0.0 if exact else 1e-5 * ranks.world
        worst = float((held - owed).abs().max())
        assert worst <= room, f"{name}: steps lost or made up, by {worst:g}"


def check_models(ranks: Stepping, exact: bool) -> None:
    """x = w - preview e in what was folded last: the window, or what a scheme that takes turns has sent."""
    for rank, (pipeline, own) in enumerate(zip(ranks.pipelines, ranks.memories(), strict=True)):
        assert 0.0 <= pipeline.preview <= 1.0
        window = (pipeline.step - 1) % WINDOWS
        waiting, flat = waiting_of(ranks, rank), ranks.flat[rank]
        off = {
            name: (x - (own[f"shared/{name}"] - pipeline.preview * waiting[name])).abs()
            for name, x in flat.items()
        }
        for unit, outcome in zip(pipeline.units, pipeline.outcomes, strict=True):
            here: Any = slice(unit.n * window // WINDOWS, unit.n * (window + 1) // WINDOWS)
            if pipeline.scheme.round_robin or unit.is_dense:
                here = outcome.update.where
            part = torch.cat([off[slot.name] for slot in unit.slots])[here]
            worst = float(part.max()) if part.numel() else 0.0
            assert worst <= (0.0 if exact else 1e-6), f"rank {rank}: {worst:g} from w - preview e"


def check_one_model(ranks: Stepping) -> None:
    """Nothing waits, and all models are the same bits."""
    for rank in range(ranks.world):
        left = sum(int(kept.count_nonzero()) for kept in ranks.pipelines[rank].residuals())
        assert left == 0, f"rank {rank}: {left} elements are still waiting"
        same = same_bits([*ranks.flat[rank].values()], [*ranks.flat[0].values()])
        assert same, f"rank {rank} has another model than rank 0"


def check_steps(ranks: Stepping, exact: bool) -> None:
    check_shared(ranks)
    check_steps_conserved(ranks, exact)
    check_models(ranks, exact)


# -- laws of gradients ----------------------------------------------------------------------------------


def check_released(released: Sequence[Mapping[str, Tensor]]) -> None:
    """Every rank's optimizer is given the same bits."""
    for rank, own in enumerate(released):
        assert same_bits([*own.values()], [*released[0].values()]), f"rank {rank} is given another gradient"


def check_untouched(before: Sequence[Mapping[str, Tensor]], after: Sequence[Mapping[str, Tensor]]) -> None:
    """A step that was skipped left every memory as it was."""
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        changed = [key for key in old if not same_bits(old[key], new[key])]
        assert not changed, f"rank {rank}: the skipped step changed {changed}"
