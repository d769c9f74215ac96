"""How many words a scheme moves at P ranks: real steps of P virtual ranks in one process, counted.

    for every scheme and P:
        every step:  acc += skewed gradient -> scheme.exchange, counted by one Meter a rank -> acc -= spent
        row       =  the worst step since it converged, and the published formula; the mean of a period

The vector is cut into the tensors of a real model, for schemes that look at layers (DEFT).

A scheme that balances its partitions takes its time, most of all by published rules: ExDyna moves one block
between neighbours in a step. It runs, as do other published rules with partitions, until the means of f and
of words over 100 steps are within 1 % of each other in three windows on end, or up to a cap; a row says which
it was, and is of the last 100 steps.

The program of a rank commits its own outcome, so that one rank's outcome is alive at a time and memory is
the residuals, P n floats. A scheme without state has nothing to converge: one step is enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from gradsieve.schemes import Ctx, Program, make
from gradsieve.testing import Meter, lockstep
from gradsieve_tools import formulas
from gradsieve_tools.bench import plots
from gradsieve_tools.bench.common.machine import check_fits, one_thread
from gradsieve_tools.bench.common.models import Transformer
from gradsieve_tools.bench.tasks.data import CONTEXT
from gradsieve_tools.bench.tasks.sized import TASKS
from gradsieve_tools.specs import parse

# Those of `bench time-to-accuracy`, the transformer as deep as that of `bench step`
MODELS = {
    "mlp": TASKS["mlp"],
    "transformer": replace(TASKS["transformer"], model=partial(Transformer, layers=8, context=CONTEXT)),
}
WORD = 4  # bytes
PERIOD = 32  # steps in which Ok-Topk evaluates each threshold exactly once
MOST_STEPS, FEWEST_STEPS = 40, PERIOD
# Partitions have settled when the means of so many windows are this near each other; they are given up after
# so many steps
WINDOW, WINDOWS, NEAR, CAP = 100, 3, 0.01, 1500
_CPU = torch.device("cpu")
_WORK = 1.1e10  # elements accumulated by all ranks in all steps of one case, while that leaves enough steps
_SETTLING_WORK = 1e11  # for a case that has to settle: the cap for a million parameters on 64 ranks
# A stateless step against one that tracks a threshold, in time: top-k looks at all n on every rank
_SELECTING = 8

COLUMNS = [
    "scheme",
    "world",
    "words",
    "formula_words",
    "of_formula",
    "times_k",
    "mean_times_k",
    "rounds",
    "formula_rounds",
    "exact_words",
    "settled_after",
    "steps",
    "ended",
    "density",
    "imbalance",
    "seconds",
]


@dataclass(frozen=True, slots=True)
class Step:
    words: float  # sent or received, whichever is more, of one op after the other
    words_sent: float
    words_received: float
    rounds: int
    collectives: int
    formula_words: float
    least_words: float
    most_words: float  # upper end of the band in which words are as the formula says
    formula_rounds: int
    exact: bool  # a step that evaluates thresholds exactly (Ok-Topk)
    density: float  # elements in the update over n
    imbalance: float | None  # longest row over the mean row; None for schemes that have no such thing

    @property
    def near_formula(self) -> bool:
        return self.least_words <= self.words <= self.most_words


@dataclass(frozen=True, slots=True)
class Case:
    scheme: str
    world: int
    n: int
    density: float
    sizes: tuple[int, ...] = ()  # elements of each tensor; empty: one tensor

    @property
    def stateless(self) -> bool:
        return not parse(self.scheme, self.density).remembers

    @property
    def settles(self) -> bool:
        """ExDyna with its balance, and published rules that have partitions."""
        scheme = parse(self.scheme, self.density)
        has_partitions = "imbalance" in scheme.report(scheme.begin(self.n, self.world))
        return has_partitions and getattr(scheme, "balance", scheme.whole_model)

    @property
    def steps(self) -> int:
        if self.stateless:
            return 1
        if self.settles:
            return min(CAP, max(MOST_STEPS, int(_SETTLING_WORK / (self.world * self.n))))
        return min(MOST_STEPS, max(FEWEST_STEPS, int(_WORK / (self.world * self.n))))

    @property
    def work(self) -> int:
        return self.world * (_SELECTING if self.stateless else 1)

    def __str__(self) -> str:
        return f"{self.scheme}, {self.world} ranks"


def layers(model: str, params: int) -> tuple[int, ...]:
    """Sizes of the tensors of a model of about `params` parameters, in the order of the pipeline's units:
    backward's."""
    task = MODELS[model]
    with torch.device("meta"):  # a size that fits nowhere is refused later, in words
        parameters = list(task.model(task.width(params)).parameters())
    return tuple(parameter.numel() for parameter in reversed(parameters))


class Gradients:
    """Skewed as in real models: a steep envelope over the vector, and a few hot rows as in an embedding.

    A rank's gradient is the envelope times (common mean + noise), noise being a slice of a pool at a random
    place: different on every rank and step, at the price of one multiply-add. The scale suits the first
    threshold of `exdyna-paper` and `micro-paper`, which have one before they have seen a gradient.
    """

    STEEP, ROW, HOT_ROWS, HOT, MEAN = 8.0, 64, 1 / 500, 1.0, 0.3

    def __init__(self, n: int, scale: float, seed: int = 0) -> None:
        self._random = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (n,), dtype=torch.int64, device=_CPU, generator=self._random) * 2 - 1
        size = torch.exp(-self.STEEP * torch.linspace(0, 1, n, dtype=torch.float32, device=_CPU))
        rows = size[: n - n % self.ROW].view(-1, self.ROW)
        order = torch.randperm(len(rows), dtype=torch.int64, device=_CPU, generator=self._random)
        rows[order[: max(1, round(len(rows) * self.HOT_ROWS))]] += self.HOT
        self.envelope = size * signs * scale
        noise = torch.randn(2 * n, dtype=torch.float32, device=_CPU, generator=self._random)
        self.pool = noise + self.MEAN

    def add_to(self, acc: Tensor) -> None:
        n = acc.numel()
        place = int(torch.randint(n + 1, (), dtype=torch.int64, device=_CPU, generator=self._random))
        acc.addcmul_(self.envelope, self.pool[place : place + n])


class Fleet:
    """P virtual ranks that take steps together."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.scheme = parse(case.scheme, case.density)
        n, world = case.n, case.world
        self.gradients = Gradients(n, scale=0.1 / self.scheme.k(n) ** 0.5)
        self.states = [self.scheme.init_state(case.sizes or (n,), world) for _ in range(world)]
        # A lossless scheme keeps nothing back, so that the ranks can write their gradients to one place.
        rows = 1 if self.scheme.lossless else world
        self.residuals = torch.zeros(rows, n, dtype=torch.float32, device=_CPU)
        self.taken = 0

    def step(self) -> Step:
        n, world = self.case.n, self.case.world
        meters = [Meter(rank, world) for rank in range(world)]
        counts = lockstep.run([self._commit(rank) for rank in range(world)], meters)
        self.taken += 1
        state = self.states[0]
        least, most = formulas.words_band(self.scheme, n, world, state)
        return Step(
            words=max(meter.moved for meter in meters) / WORD,
            words_sent=max(meter.sent for meter in meters) / WORD,
            words_received=max(meter.received for meter in meters) / WORD,
            rounds=max(meter.rounds for meter in meters),
            collectives=max(meter.collectives for meter in meters),
            formula_words=formulas.words(self.scheme, n, world, state),
            least_words=least,
            most_words=most,
            formula_rounds=formulas.rounds(self.scheme, n, world, state),
            exact=bool(self.scheme.report(state).get("exact")),
            density=counts[0] / n,
            imbalance=self.scheme.report(state).get("imbalance"),
        )

    def _commit(self, rank: int) -> Program[int]:
        """Take one rank's step, and return how many elements the update has."""
        acc = self.residuals[rank if len(self.residuals) > 1 else 0]
        if self.scheme.lossless:
            acc.zero_()
        self.gradients.add_to(acc)
        ctx = Ctx(rank, self.case.world, self.taken)
        outcome = yield from self.scheme.exchange(acc, self.states[rank], ctx)
        if not self.scheme.lossless:
            outcome.spent.subtract_from(acc)
        self.states[rank] = self.scheme.next_states([outcome.state])[0]
        return outcome.update.count


def measure_all(cases: Sequence[Case], advance: Callable[[float, str], None]) -> list[dict[str, Any]]:
    """The rows of all cases; `advance` is called with the work done and what it was."""
    for case in cases:
        _fits(case)
    with one_thread():
        return [_measured(case, advance) for case in cases]


def _measured(case: Case, advance: Callable[[float, str], None]) -> dict[str, Any]:
    row = measure(case, partial(_tell, case, advance))
    if row["steps"] < case.steps:
        advance((case.steps - row["steps"]) * case.work, f"{case}, settled")
    return row


def _tell(case: Case, advance: Callable[[float, str], None], taken: int) -> None:
    advance(case.work, f"{case}, step {taken} of {case.steps}")


def measure(case: Case, after_step: Callable[[int], None] = lambda taken: None) -> dict[str, Any]:
    """Run one case; its row."""
    start = time.perf_counter()
    fleet, steps = Fleet(case), []
    for _ in range(case.steps):
        steps.append(fleet.step())
        after_step(fleet.taken)
        if case.settles and has_settled(steps):
            break
    settled = settled_after(steps)
    seen = steps[len(steps) // 2 if settled is None else min(settled, len(steps) // 2) :]
    if case.settles:
        seen = steps[-WINDOW:]
    worst = max([step for step in seen if not step.exact] or seen, key=lambda step: step.words)
    exact = [step.words for step in steps if step.exact]
    unit = fleet.scheme.k(case.n) * (case.world - 1) / case.world
    return {
        "scheme": case.scheme,
        "world": case.world,
        **asdict(worst),
        "density": sum(step.density for step in seen) / len(seen),
        "of_formula": worst.words / worst.formula_words if worst.formula_words else 1.0,
        "times_k": worst.words / unit,
        "mean_times_k": fmean(step.words for step in steps[-PERIOD:]) / unit,
        "exact_words": max(exact) if exact else None,
        "settled_after": settled,
        "steps": len(steps),
        "ended": ("settled" if has_settled(steps) else "cap") if case.settles else "fixed",
        "seconds": time.perf_counter() - start,
    }


def settled_after(steps: Sequence[Step]) -> int | None:
    """Steps before the first from which on all stay near the formula; None if the last one is not."""
    far = [index for index, step in enumerate(steps) if not step.near_formula]
    settled = far[-1] + 1 if far else 0
    return settled if settled < len(steps) else None


def has_settled(steps: Sequence[Step]) -> bool:
    """Return whether imbalance and words stayed for several windows; exact steps are left out."""
    if len(steps) < WINDOW * WINDOWS or len(steps) % WINDOW:
        return False
    starts = range(len(steps) - WINDOW * WINDOWS, len(steps), WINDOW)
    windows = [steps[start : start + WINDOW] for start in starts]
    windows = [[step for step in window if not step.exact] or window for window in windows]
    words = [fmean(step.words for step in window) for window in windows]
    shares = [fmean(step.imbalance or 1.0 for step in window) for window in windows]
    return all(max(means) <= (1 + NEAR) * min(means) for means in (words, shares))


def _fits(case: Case) -> None:
    needed = case.world * case.n * WORD
    check_fits(needed, f"residuals of {case} with {case.n:,} parameters", "lower --params or --world")


def plot(rows: Sequence[dict[str, Any]], n: int, density: float, path: Path) -> None:
    title = f"Traffic on skewed gradients, {n:,} parameters, density {density:g}"
    plots.traffic(rows, lambda world: formulas.words(make("dense"), n, world), title, path)
