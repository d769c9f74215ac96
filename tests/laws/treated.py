"""P virtual ranks that train under a treatment, and the laws of treatments.

Each law is a function that raises AssertionError where it is broken (see `test_exchanges_can_fail.py`).
Numbers are whole, times a power of two: where the number of ranks is a power of two as well, laws hold to the
last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.feedback.local_steps import WINDOWS
from gradsieve.feedback.units import flat_view, parts_of
from gradsieve.feedback.velocity import Momentum
from gradsieve.pipeline import GradientPipeline, StepPipeline
from gradsieve.pipeline.exchange_settings import Exchange, Gradients, Steps
from gradsieve.schemes import make
from gradsieve.schemes.base import Scheme
from gradsieve.testing.laws import same_bits, same_state
from laws.cases import WORLDS

UNIT = 2.0**-6
SMALL = 6
"""Tensors below this many elements go dense here."""

STEPS = {
    "measured": Steps(small=SMALL),
    "whole": Steps(small=SMALL, preview=1.0),
    "half": Steps(small=SMALL, preview=0.5),
    "hidden": Steps(small=SMALL, preview=0.0),
    "warm-up": Steps(small=SMALL, preview=1.0, warm_up=3),
    "refresh": Steps(small=SMALL, refresh=2),
    "all sparse": Steps(small=0),
}
_PLAIN = Gradients(small=SMALL)
GRADIENTS = {
    "plain": _PLAIN,
    "local": replace(_PLAIN, momentum="local"),
    "masked": replace(_PLAIN, momentum="masked"),
    "by rate": replace(_PLAIN, by_rate=True),
    "clipped": replace(_PLAIN, clip=0.05),
    "warm-up": replace(_PLAIN, warm_up=3),
    "refresh": replace(_PLAIN, refresh=2),
    "estimate": replace(_PLAIN, memory="estimate"),
    "estimate, momentum": replace(_PLAIN, memory="estimate", momentum="local", warm_up=2),
    "as dgc": replace(_PLAIN, momentum="masked", clip=0.05, small=0, by_rate=True),
}
MOMENTUM = Momentum(0.5, 0.25, nesterov=False)


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

    pipelines: Sequence[GradientPipeline | StepPipeline]

    def run(self, tensors: Sequence[Mapping[str, Tensor]], everything: bool = False) -> None:
        for index in range(len(self.pipelines[0].units)):
            lockstep.run(
                [
                    pipeline.program(index, own, everything)
                    for pipeline, own in zip(self.pipelines, tensors, strict=True)
                ]
            )

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

    def __init__(self, case: Case, scheme: str | Scheme[Any], treatment: Exchange) -> None:
        self.case, self.world = case, case.world
        scheme = make(scheme, case.density) if isinstance(scheme, str) else scheme
        self.models = [case.model() for _ in range(case.world)]
        self.pipelines = [
            StepPipeline(model.items(), scheme, rank, case.world, case.cap_mb, treatment)
            for rank, model in enumerate(self.models)
        ]
        self.flat = [{name: flat_view(p) for name, p in model.items()} for model in self.models]
        self.owed = {name: case.world * p.double() for name, p in self.flat[0].items()}
        """P times the first model, less all that the optimizers of all ranks moved."""

    def move(self, rank: int, step: Mapping[str, Tensor]) -> None:
        for name, parameter in self.flat[rank].items():
            before = parameter.clone()
            parameter -= step[name]
            self.owed[name] -= before.double() - parameter.double()

    def exchange(self, everything: bool = False) -> None:
        self.run(self.flat, everything)
        for pipeline, own in zip(self.pipelines, self.flat, strict=True):
            pipeline.finish(own)

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
        treatment: Exchange,
        momentum: Momentum = MOMENTUM,
    ) -> None:
        self.case, self.world = case, case.world
        scheme = make(scheme, case.density) if isinstance(scheme, str) else scheme
        self.model = case.model()
        moved = None if treatment.momentum == "optimizer" else dict.fromkeys(self.model, momentum)
        self.pipelines = [
            GradientPipeline(self.model.items(), scheme, rank, case.world, case.cap_mb, treatment, moved)
            for rank in range(case.world)
        ]

    def advance(self, step: int) -> list[dict[str, Tensor]]:
        return self.give([self.case.numbers(step, rank) for rank in range(self.world)])

    def give(self, gradients: list[dict[str, Tensor]], everything: bool = False) -> list[dict[str, Tensor]]:
        """What the optimizer of each rank is given instead."""
        self.run(gradients, everything)
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
    for local, e in zip(pipeline.local, pipeline.waiting(), strict=True):
        out |= parts_of(e, local.unit.sparse)
        out |= parts_of(local.waiting_dense(pipeline.own), local.unit.dense)
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
    """x = w - preview e in what was folded last: the window, or what a scheme that takes turns has sent; and
    in what goes dense."""
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
            if pipeline.scheme.round_robin:
                here = outcome.update.where
            sparse = torch.cat([x[:0] for x in flat.values()] + [off[slot.name] for slot in unit.sparse])
            for part in (sparse[here], *(off[slot.name] for slot in unit.dense)):
                worst = float(part.max()) if part.numel() else 0.0
                assert worst <= (0.0 if exact else 1e-6), f"rank {rank}: {worst:g} from w - preview e"


def check_one_model(ranks: Stepping) -> None:
    """Nothing waits, and all models are the same bits."""
    for rank in range(ranks.world):
        left = sum(int(kept.count_nonzero()) for kept in ranks.pipelines[rank].waiting())
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


def check_estimates(ranks: Receiving, exact: bool) -> None:
    """EF21: the total is the sum of the ranks' estimates, the same bits on every rank."""
    memories = ranks.memories()
    for key in [key for key in memories[0] if key.startswith("total/")]:
        found, name = memories[0][key], key.removeprefix("total/")
        assert all(same_bits(own[key], found) for own in memories), f"{name}: another total"
        off = float((total(memories, f"estimate/{name}") - found.double()).abs().max())
        assert off <= (0.0 if exact else 1e-5), f"{name}: estimates and total differ by {off:g}"


def check_velocities(ranks: Receiving, before: Sequence[Mapping[str, Tensor]], given: Any) -> None:
    """u = m u + g + decay w; forgotten where an element was sent if the treatment masks, and only there."""
    for rank, (own, pipeline) in enumerate(zip(ranks.memories(), ranks.pipelines, strict=True)):
        sent = _sent(pipeline) if pipeline.settings.momentum == "masked" else {}
        for name, gradient in given[rank].items():
            key = f"velocity/{name}"
            u = gradient + MOMENTUM.decay * flat_view(ranks.model[name]) + MOMENTUM.factor * before[rank][key]
            expected = torch.where(sent[name], 0.0, u) if name in sent else u
            assert torch.equal(own[key], expected), f"rank {rank}: another velocity of {name}"


def _sent(pipeline: GradientPipeline) -> dict[str, Tensor]:
    """Which elements of the sparse slots this rank sent, where it did not send all of them."""
    out = {}
    for unit, outcome in zip(pipeline.units, pipeline.outcomes, strict=True):
        if outcome.spent.count < unit.n:
            marks = torch.zeros(unit.n, dtype=torch.bool).index_fill(0, outcome.spent.listed(), True)
            out.update({slot.name: marks[slot.start : slot.stop] for slot in unit.sparse})
    return out


def check_by_rate(
    moved: Mapping[str, Tensor], fed: Mapping[str, Tensor], ranks: Receiving, room: float
) -> None:
    """Sum of rate * update + rate * what waits == sum of rate * gradient."""
    rate, memories = ranks.pipelines[0].residual_rate, ranks.memories()
    for name, wanted in fed.items():
        found = moved[name] + rate * total(memories, f"residual/{name}")
        worst = float((found - wanted).abs().max())
        assert worst <= room, f"{name}: {worst:g} lost or made up, in units of rate times gradient"


def check_untouched(before: Sequence[Mapping[str, Tensor]], after: Sequence[Mapping[str, Tensor]]) -> None:
    """A step that was skipped left every memory as it was."""
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        changed = [key for key in old if not same_bits(old[key], new[key])]
        assert not changed, f"rank {rank}: the skipped step changed {changed}"
