"""`gradsieve bench overhead`: what a rank computes in a step besides training, over the least it could be.

    ours   accumulate + select + encode + decode + apply + commit, and where steps are exchanged the check of
           the gradients; everything but waiting for the network. The mean over ranks: in a step each of them
           owns another part of the vector
    bare   a.add_(b) and b.zero_() over as many float32 elements, in the same round

All P virtual ranks take real steps in this process, so that what arrives is what real peers would send.
Between two pieces of a rank's work the other ranks' vectors pass through the caches, as a training step's
weights and activations would: neither ours nor bare finds anything warm.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from gradsieve import Gradients, Steps
from gradsieve.testing import Pending, kernels, lockstep, make_pipeline
from gradsieve_tools.bench.common.clock import Clock
from gradsieve_tools.bench.common.machine import check_fits, one_thread
from gradsieve_tools.specs import parse

STAGES = ("accumulate", "select", "apply", "commit", "check")
COLUMNS = ["scheme", "exchange", "kernel", "ours_ms", "bare_ms", "ratio", "density"]
# Steps until the threshold is found and followed, and steps that are timed with each kernel
WARM, ROUNDS = 12, 9
_CPU = torch.device("cpu")
_VECTORS = 4  # vectors a rank needs: parameters, gradients, two of the sync's
_FLOAT = 4
_WIDTH = 2048  # layers of 2048 x 2048, the shape that bench step's MLP has
_RATE, _STEEP = 0.01, 4.0

ExchangeOf: TypeAlias = Literal["steps", "gradients"]


@dataclass(frozen=True, slots=True)
class Case:
    scheme: str
    exchange: ExchangeOf
    world: int
    params: int
    density: float


def cases(schemes: Sequence[str], world: int, params: int, density: float) -> list[Case]:
    """A lossless scheme has no residual, so that it exchanges gradients alone."""
    check_fits(
        _VECTORS * _FLOAT * params * world,
        f"{world} ranks with {params:,} parameters",
        "lower --params or --world",
    )
    found = []
    for scheme in schemes:
        parse(scheme, density).init_state([params], world)  # refused before minutes of measuring
        for exchange in ("steps", "gradients"):
            if exchange == "gradients" or not parse(scheme).lossless:
                found.append(Case(scheme, exchange, world, params, density))
    return found


def kernels_here() -> list[str]:
    """The forms that run here, the fast one first."""
    return ["compiled", "torch"] if kernels.active() == "compiled" else ["torch"]


def work(case: Case) -> int:
    """Steps that a case takes."""
    return WARM + ROUNDS * len(kernels_here())


class Rank:
    """A virtual rank: parameters, gradients and the pipeline for them."""

    def __init__(self, case: Case, rank: int) -> None:
        self._random = torch.Generator().manual_seed(rank)
        self.parameters = _parameters(case.params)
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.SGD(self.parameters.values(), lr=_RATE)
        scheme, exchange = (
            parse(case.scheme, case.density),
            Steps() if case.exchange == "steps" else Gradients(),
        )
        self.pipeline = make_pipeline(self.parameters, [optimizer], scheme, exchange, rank, case.world)

    @property
    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def train(self, noise: Tensor) -> None:
        """A new gradient, some of its rows hotter than others; where steps are exchanged, a step as well."""
        for parameter, gradient in zip(self.parameters.values(), self.gradients, strict=True):
            spare = noise.numel() - gradient.numel()
            place = int(torch.randint(spare + 1, (), dtype=torch.int64, device=_CPU, generator=self._random))
            powers = torch.linspace(-_STEEP, 0.0, len(gradient), dtype=noise.dtype, device=noise.device)
            heat = powers.exp_()[:, None]
            torch.mul(noise[place : place + gradient.numel()].view_as(gradient), heat, out=gradient)
            if self.pipeline.exchanges_steps:
                parameter.sub_(gradient, alpha=_RATE)


def _parameters(params: int) -> dict[str, nn.Parameter]:
    layers = max(1, round(params / _WIDTH**2))
    rows = max(1, round(params / layers / _WIDTH))
    each = [torch.zeros(rows, _WIDTH, dtype=torch.float32, device=_CPU) for _ in range(layers)]
    return {f"layer{number}": nn.Parameter(values) for number, values in enumerate(each)}


@dataclass(frozen=True, slots=True)
class Work:
    seconds: float
    stages: dict[str, float]


def step(ranks: Sequence[Rank]) -> list[Work]:
    """Let all ranks exchange, and return the work of each."""
    clocks = [Clock() for _ in ranks]
    begun = [clock.call(rank.pipeline.begin) for clock, rank in zip(clocks, ranks, strict=True)]
    members = list(zip(ranks, begun, clocks, strict=True))
    for index in range(len(ranks[0].pipeline.units)):
        lockstep.run([clock.program(rank.pipeline.program(own, index)) for rank, own, clock in members])
    return [_finished(rank, own, clock) for rank, own, clock in members]


def _finished(rank: Rank, pending: Pending, clock: Clock) -> Work:
    clock.call(lambda: rank.pipeline.finish(pending))
    stages = rank.pipeline.stats.seconds
    if rank.pipeline.exchanges_steps:  # as GradientSync.before_optimizer_step does
        start = time.perf_counter()
        clock.call(lambda: kernels.is_finite(*rank.gradients))
        stages["check"] = time.perf_counter() - start
    return Work(clock.seconds, stages)


def bare(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Seconds of the floor: one pass that adds, one that fills."""
    clock = Clock()
    clock.call(lambda: [x.add_(y) for x, y in zip(a, b, strict=True)])
    clock.call(lambda: [y.zero_() for y in b])
    return clock.seconds


@dataclass(frozen=True, slots=True)
class Round:
    ranks: list[Work]
    bare: float
    sent: int

    @property
    def ours(self) -> float:
        return statistics.fmean(work.seconds for work in self.ranks)

    def stage(self, name: str) -> float:
        return statistics.fmean(work.stages.get(name, 0.0) for work in self.ranks)  # not all ranks have all


@torch.no_grad()
def measure(case: Case, advance: Callable[[float, str], None]) -> list[dict[str, Any]]:
    """Return one row a kernel. Kernels run round robin, each next to a bare run of its own."""
    with one_thread():
        ranks = [Rank(case, rank) for rank in range(case.world)]
        noise = torch.randn(2 * ranks[0].gradients[0].numel(), dtype=torch.float32, device=_CPU)
        rounds: dict[str, list[Round]] = {kernel: [] for kernel in kernels_here()}
        for number in range(WARM + ROUNDS):
            for kernel in kernels_here() if number >= WARM else kernels_here()[:1]:
                for rank in ranks:
                    rank.train(noise)
                with kernels.using(kernel):
                    works = step(ranks)
                # The gradients have served: the floor is measured where they lie.
                floor = bare(ranks[0].gradients, ranks[1].gradients)
                if number >= WARM:
                    rounds[kernel].append(Round(works, floor, ranks[0].pipeline.stats.sent))
                advance(1, f"{case.scheme}, {case.exchange}, {kernel}")
    n = sum(gradient.numel() for gradient in ranks[0].gradients)
    return [_row(case, kernel, own, n) for kernel, own in rounds.items()]


def _row(case: Case, kernel: str, rounds: Sequence[Round], n: int) -> dict[str, Any]:
    ratios = [each.ours / each.bare for each in rounds]
    stages = [name for name in STAGES if name in rounds[0].ranks[0].stages]
    return {
        "scheme": case.scheme,
        "exchange": case.exchange,
        "kernel": kernel,
        "params": n,
        "ours_ms": _median_ms(each.ours for each in rounds),
        "bare_ms": _median_ms(each.bare for each in rounds),
        "ratio": round(statistics.median(ratios), 3),
        "density": statistics.fmean(each.sent for each in rounds) / n,
        "stage_ms": {name: _median_ms(each.stage(name) for each in rounds) for name in stages},
        "ratio_all": [round(ratio, 3) for ratio in ratios],
    }


def _median_ms(seconds: Iterable[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3)


def by_stage(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Milliseconds of each stage as columns, by the clock on the wall. They leave out the bookkeeping between
    stages, and have the time of other processes in them."""
    names = ("scheme", "exchange", "kernel")
    return [{**{name: row[name] for name in names}, **row["stage_ms"]} for row in rows]
