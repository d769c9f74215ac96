"""All schemes side by side on the same recorded gradients: P virtual ranks in one process.

    for every model:  record its gradients once
    for every world, density and scheme:
        every step:   acc = residual + gradient -> exchange, counted and timed -> residual = acc - spent
        row         = means over the second half of the steps

Fewer ranks than were recorded are the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.schemes import Ctx, Program, Scheme, target_count
from gradsieve.testing import Meter, lockstep
from gradsieve_tools.bench.common import fidelity
from gradsieve_tools.bench.common.clock import Clock
from gradsieve_tools.bench.common.machine import check_fits, one_thread
from gradsieve_tools.bench.common.models import Task, build
from gradsieve_tools.bench.common.recordings import WARM_STEPS, Recording, record
from gradsieve_tools.results import table
from gradsieve_tools.specs import parse

WORD = 4  # bytes
_RECORDING = 3  # time of a recorded backward over a step of a scheme

COLUMNS = [
    "scheme",
    "words",
    "times_k",
    "rounds",
    "of_target",
    "fidelity",
    "residual",
    "imbalance",
    "select_ms",
    "lost",
]


@dataclass(frozen=True, slots=True)
class Step:
    words: float  # sent or received, the larger, of one op after the other
    times_k: float  # `words` over k (P-1)/P
    rounds: float
    of_target: float  # elements in the update over k
    fidelity: float
    residual: float
    imbalance: float
    select_ms: float  # processor time in the scheme's own code


@dataclass(frozen=True, slots=True)
class Plan:
    models: Sequence[str]
    schemes: Sequence[str]
    worlds: Sequence[int]
    densities: Sequence[float]
    steps: int

    def cases(self) -> Iterator[tuple[int, float, str]]:
        for world in self.worlds:
            for density in self.densities:
                for scheme in self.schemes:
                    yield world, density, scheme

    def work(self) -> int:
        recording = _RECORDING * max(self.worlds) * (WARM_STEPS + self.steps)
        return len(self.models) * (recording + sum(world * self.steps for world, _, _ in self.cases()))


class Fleet:
    """P virtual ranks that are shown recorded gradients, one step after the other."""

    def __init__(self, scheme: Scheme[Any], recording: Recording, world: int, density: float) -> None:
        self.scheme, self.recording, self.world = scheme, recording, world
        self.k = target_count(density, recording.n)
        self.states = [scheme.init_state(recording.sizes, world) for _ in range(world)]
        self.residuals = recording.gradients.new_zeros(world, recording.n)
        self.given = recording.gradients.new_zeros(recording.n, dtype=torch.float64)
        self.applied = torch.zeros_like(self.given)
        self.sent = 0.0  # sum of the magnitudes in all updates
        self.taken = 0

    def step(self) -> Step:
        gradients = self.recording.gradients[self.taken, : self.world]
        accs = self.residuals.add_(gradients)
        gradient, total = _over_ranks(gradients), _over_ranks(accs)
        meters = [Meter(rank, self.world) for rank in range(self.world)]
        clocks = [Clock() for _ in meters]
        outcomes = lockstep.run(
            [clock.program(self._program(rank)) for rank, clock in enumerate(clocks)], meters
        )
        for rank, outcome in enumerate(outcomes):
            outcome.spent.subtract_from(self.residuals[rank])
            self.states[rank] = self.scheme.next_states([outcome.state])[0]
        update = outcomes[0].update
        self.given += gradient
        self.applied += update.to_dense()
        self.sent += float(update.values.abs().sum())
        self.taken += 1
        words = max(meter.moved for meter in meters) / WORD
        return Step(
            words=words,
            times_k=words / (self.k * (self.world - 1) / self.world),
            rounds=max(meter.rounds for meter in meters),
            of_target=update.count / self.k,
            fidelity=fidelity.captured(total, update),
            residual=fidelity.left_behind(_over_ranks(self.residuals), gradient),
            imbalance=fidelity.imbalance(
                self.scheme.report(self.states[0]), [outcome.spent.count for outcome in outcomes]
            ),
            select_ms=max(clock.seconds for clock in clocks) * 1000,
        )

    def _program(self, rank: int) -> Program[Any]:
        ctx = Ctx(rank, self.world, self.taken)
        return self.scheme.exchange(self.residuals[rank], self.states[rank], ctx)

    def missing(self) -> Tensor:
        """Return what is neither applied nor in a residual."""
        return self.given - self.applied - _over_ranks(self.residuals)

    def lost(self) -> float:
        """The largest missing element, over that of all gradients' sum."""
        return float(self.missing().abs().max() / self.given.abs().max())


def _over_ranks(vectors: Tensor) -> Tensor:
    return vectors.sum(0, dtype=torch.float64)


def measure_all(plan: Plan, advance: Callable[[float, str], None]) -> list[dict[str, Any]]:
    """The rows of a plan; `advance` is called with the work done and what it was."""
    _check_schemes(plan)
    tasks = {model: build(model) for model in plan.models}
    most = max(plan.worlds)
    for model, task in tasks.items():
        needed = most * (plan.steps + 2) * task.n * WORD
        check_fits(needed, f"{model}'s gradients of {most} ranks", "lower --world or --steps")
    with one_thread():
        return [row for model in tasks for row in _measure_model(model, tasks[model], plan, advance)]


def _check_schemes(plan: Plan) -> None:
    """Refuse before the first recording what cannot be measured after it."""
    for world, density, text in plan.cases():
        scheme = parse(text, density)
        if scheme.no_comm:
            raise ConfigError(
                f"{text} exchanges nothing, so that there is no update to look at: leave it out"
            )
        scheme.init_state([1], world)


def _measure_model(
    model: str, task: Task, plan: Plan, advance: Callable[[float, str], None]
) -> Iterator[dict[str, Any]]:
    most = max(plan.worlds)

    def recorded(taken: int) -> None:
        advance(_RECORDING * most, f"{model}: recording, step {taken} of {WARM_STEPS + plan.steps}")

    recording = record(task, most, plan.steps, after_step=recorded)
    for world, density, scheme in plan.cases():
        row = measure(parse(scheme, density), recording, world, density)
        yield {"model": model, "n": recording.n, "world": world, "density": density, "scheme": scheme, **row}
        advance(world * plan.steps, f"{model}: {scheme}, {world} ranks, density {density:g}")


def measure(scheme: Scheme[Any], recording: Recording, world: int, density: float) -> dict[str, float]:
    """Run a scheme on all recorded steps; counts are compared with `density`, also for dense."""
    fleet = Fleet(scheme, recording, world, density)
    steps = [asdict(fleet.step()) for _ in recording.gradients]
    seen = steps[len(steps) // 2 :]
    means = {field.name: sum(step[field.name] for step in seen) / len(seen) for field in fields(Step)}
    return {**means, "lost": fleet.lost()}


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table for every model, world and density."""
    blocks = groupby(map(_short, rows), key=itemgetter("model", "n", "world", "density"))
    return "\n\n".join(
        f"{model}, {n:,} parameters, {world} ranks, density {density:g}\n{table(list(block), COLUMNS)}"
        for (model, n, world, density), block in blocks
    )


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """`lost` is of interest by its order of magnitude only."""
    return {**row, "lost": float(f"{row['lost']:.0e}")}
