"""`gradsieve bench bits`: what one exchange sends of the residual, against the bits that it takes.

    for every task:   train it on P virtual ranks by stripes as they are; now and then keep the residual, e_r
    for every scheme, values and density:
        exchange what was kept, counted; nothing is taken away from it
        known = 1 - |mean e - update / P|^2 over |mean e|^2
        bits = 8 * bytes that the busiest rank moves over n

A scheme that remembers goes through all that was kept once, to converge, before it is measured on it. One
that takes the elements round robin is measured over whole rounds: where a stretch lies decides what is in it,
and the beginning of the vector, the last layer's, is like no other part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from gradsieve import Steps
from gradsieve.errors import ConfigError
from gradsieve.schemes import Agreed, Ctx, Scheme, Sparse, Stripes, Values, check_density
from gradsieve.testing import Meter, lockstep
from gradsieve_tools.bench.common.fidelity import taken
from gradsieve_tools.bench.common.machine import check_fits, one_thread
from gradsieve_tools.bench.common.virtual import Member, Run, exchange
from gradsieve_tools.bench.tasks import training as tasks
from gradsieve_tools.specs import parse

COLUMNS = ["task", "scheme", "values", "density", "bits", "known", "bound"]
Advance = Callable[[float, str], None]
_STEP = 5  # A rank's step of training against an exchange of a snapshot, in time
_LONG = 64  # exchanges in a round from which on one round is enough, with the snapshots round robin as well
_COPIES = 8  # vectors of the model's size a rank of a training needs: model, anchors, moments, gradient


@dataclass(frozen=True, slots=True)
class Plan:
    tasks: Sequence[str]
    schemes: Sequence[str]
    values: Sequence[Values]  # for schemes that leave the codec open
    densities: Sequence[float]
    world: int = 4
    steps: int = 200  # steps before the first snapshot
    snapshots: int = 4
    # Steps from one snapshot to the next. Not 10, which are three rounds of stripes at their default density:
    # it would be the same stretch's turn in every snapshot.
    every: int = 7

    def cases(self) -> list[Case]:
        return [case for text in self.schemes for case in _cases(text, self.values, self.densities)]

    @property
    def trained(self) -> int:
        return self.steps + self.every * (self.snapshots - 1)

    def work(self) -> float:
        exchanges = sum(case.exchanges for case in self.cases()) * self.snapshots
        return len(self.tasks) * self.world * (_STEP * self.trained + exchanges)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    scheme: Scheme[Any]

    @property
    def values(self) -> str:
        """Return how values travel; schemes that leave no choice send them as they are."""
        return self.scheme.values if isinstance(self.scheme, Agreed) else "exact"

    @property
    def exchanges(self) -> float:
        if self.scheme.round_robin:
            return 1 + 0.02 / self.scheme.density
        return 2 if self.scheme.remembers else 1


def _cases(text: str, values: Sequence[Values], densities: Sequence[float]) -> Iterator[Case]:
    name, _, settings = text.partition(":")
    fixed = any(setting.startswith("values=") for setting in settings.split("+"))
    for density in densities:
        scheme = parse(text, density)
        if scheme.no_comm or scheme.lossless:
            raise ConfigError(f"{name} sends nothing or everything, whatever the density: leave it out")
        if fixed or not isinstance(scheme, Agreed):
            yield Case(text, scheme)
            continue
        for each in values:
            chosen = replace(scheme, values=each)
            # At density 1 most schemes are the dense exchange: values in few bits would be a line twice.
            if each == "exact" or not chosen.is_whole:
                yield Case(text, chosen)


@dataclass(frozen=True, slots=True)
class Waiting:
    sizes: list[int]  # elements of each tensor in a vector
    vectors: Tensor  # (snapshots, world, n)

    @property
    def n(self) -> int:
        return self.vectors.shape[-1]


def record(task: str, plan: Plan, after_step: Callable[[int], None] = lambda step: None) -> Waiting:
    """Train with the task's own schedule, of which `plan.trained` steps are the beginning."""
    run = Run(task, Stripes(), Steps(), seed=0, world=plan.world)
    members = [Member(run, rank) for rank in range(plan.world)]
    units = members[0].pipeline.units
    kept = []
    for step in range(1, plan.trained + 1):
        for member in members:
            member.backward()
        if step >= plan.steps and (step - plan.steps) % plan.every == 0:
            kept.append(torch.stack([torch.cat(list(member.pipeline.residuals())) for member in members]))
        exchange(members)
        for member in members:
            member.step()
        after_step(step)
    return Waiting([size for unit in units for size in unit.sizes], torch.stack(kept))


def share_known(mean: Tensor, update: Sparse, world: int) -> float:
    """Share of the energy of `mean` that the update, a sum over ranks, takes away.

    It is below 0 where the update adds more than it takes away. Of a vector of zeros everything is sent.
    """
    energy = mean.square().sum()
    if not energy:
        return 1.0
    step = replace(update, source=update.values.to(mean.dtype) / world)
    return float(taken(mean, step) / energy)


def bound(bits: float, world: int) -> float:
    """Most that so many bits a parameter send of a Gaussian vector: R bits an element leave 2^(-2 R) of it.

    R bits up and R bits down are 2 R (P-1)/P moved. It is as if one rank had the mean already and only had to
    send it, and holds where all elements are Gaussian, alike and independent: not where tails are heavy.
    """
    rate = bits / (2 * (world - 1) / world)
    return 1.0 - math.pow(2.0, -2.0 * rate)


class Bench:
    """P virtual ranks that exchange what was kept, with the scheme's state carried along."""

    def __init__(self, scheme: Scheme[Any], waiting: Waiting) -> None:
        self.scheme, self.waiting = scheme, waiting
        self.world = waiting.vectors.shape[1]
        self.states = [scheme.init_state(waiting.sizes, self.world) for _ in range(self.world)]
        self.steps = 0

    def exchange(self, vectors: Tensor) -> tuple[Sparse, float]:
        """The update, and the bits a parameter that it took."""
        meters = [Meter(rank, self.world) for rank in range(self.world)]
        programs = [
            self.scheme.exchange(vectors[rank], self.states[rank], Ctx(rank, self.world, self.steps))
            for rank in range(self.world)
        ]
        outcomes = lockstep.run(programs, meters)
        self.states = [self.scheme.next_states([outcome.state])[0] for outcome in outcomes]
        self.steps += 1
        return outcomes[0].update, 8 * max(meter.moved for meter in meters) / self.waiting.n

    def look(self, *snapshots: Tensor) -> Iterator[tuple[float, float]]:
        """Bits and share sent of one exchange, or of each in a round."""
        shown = [(vectors, vectors.mean(0, dtype=torch.float64)) for vectors in snapshots]
        met = 0
        for vectors, mean in cycle(shown):
            update, bits = self.exchange(vectors)
            yield bits, share_known(mean, update, self.world)
            met += update.count
            if not self.scheme.round_robin or met >= self.waiting.n:
                return


def measure(scheme: Scheme[Any], waiting: Waiting) -> dict[str, float]:
    """Means over all exchanges."""
    bench = Bench(scheme, waiting)
    if scheme.round_robin and scheme.density * _LONG <= 1:
        seen = list(bench.look(*waiting.vectors))
    else:
        if scheme.remembers and not scheme.round_robin:
            for vectors in waiting.vectors:
                bench.exchange(vectors)
        seen = [pair for vectors in waiting.vectors for pair in bench.look(vectors)]
    bits, share = (sum(figures) / len(seen) for figures in zip(*seen, strict=True))
    return {"bits": bits, "known": share, "bound": bound(bits, bench.world)}


def measure_all(plan: Plan, advance: Advance) -> list[dict[str, Any]]:
    """The rows of a plan, sorted; `advance` is called with the work done and what it was."""
    for density in plan.densities:
        check_density(density)
    cases = plan.cases()
    for case in cases:
        case.scheme.init_state([1], plan.world)  # refused now rather than after the training
    rows = []
    with one_thread():
        for task in plan.tasks:
            needed = 4 * tasks.build(task, seed=0).n * plan.world * (plan.snapshots + _COPIES)
            check_fits(needed, f"{task}'s models", "lower --world or --snapshots")
            waiting = record(task, plan, partial(_recorded, task, plan, advance))
            for case in cases:
                figures = measure(case.scheme, waiting)
                named = {"scheme": case.name, "values": case.values, "density": case.scheme.density}
                rows.append({"task": task, **named, **figures})
                work = plan.world * plan.snapshots * case.exchanges
                advance(work, f"{task}: {case.name}, {case.values}, density {case.scheme.density:g}")
    return sorted(rows, key=lambda row: (plan.tasks.index(row["task"]), row["bits"]))


def _recorded(task: str, plan: Plan, advance: Advance, step: int) -> None:
    advance(plan.world * _STEP, f"{task}: training, step {step} of {plan.trained}")
