"""Rivals that are settings of gradsieve's own engine: what it exchanges, when, and what is made of the mean.

    local-sgd   steps 1 to 3, all elements                     local SGD, arXiv 1805.09767; in few bits
                                                               with error feedback: Qsparse, 1906.02367
    diloco      the same and an outer step, 4                  DiLoCo, arXiv 2311.08105
    one-shot    the same as local-sgd, once, at the end        one-shot averaging, Zinkevich et al. 2010
    sparta      1 to 3 in every step, a random few elements    SPARTA, EXO Labs 2025, no paper
    one-bit     signs of gradients, or of what steps moved     EF-SignSGD, arXiv 1901.09847; the
                                                               sum rounded too: DoubleSqueeze, 1905.05957

1. Every rank's optimizer takes `every` steps on its own model.            DiLoCo: InnerOpt
2. What they moved is averaged over ranks.                                 the outer gradient
3. All ranks go on from the shared model less that mean.
4. Outer step: v = momentum v + mean; model -= rate (mean + momentum v).   OuterOpt, Nesterov

The exchange stands where papers have it: right after the step, so that the next gradient knows it. (Ours runs
behind the next forward and backward, one step late.) Steps are as long as the optimizer makes them.

Differences. SPARTA draws elements again in every step; here each is sent once in 1/density steps, in a
random order. `values` in few bits has the mean rounded as well, as an owner sends it back; local SGD keeps
what rounding left for the next time, DiLoCo drops it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from gradsieve import Gradients, Steps
from gradsieve.errors import ConfigError
from gradsieve.schemes import Ctx, RandomK, Stripes, Values, check_density
from gradsieve.testing import Exchange
from gradsieve_tools.bench.rivals.base import Part, Rival, at_least
from gradsieve_tools.bench.rivals.engine import EnginePart, OuterPart
from gradsieve_tools.bench.tasks.training import Training


@dataclass(frozen=True, slots=True)
class LocalSgd(Rival):
    every: int = 8
    values: Values = "exact"

    def __post_init__(self) -> None:
        at_least(1, every=self.every)

    def begin(self, training: Training, ctx: Ctx) -> Part:
        return EnginePart(training, ctx, Stripes(density=1.0, values=self.values), _steps(self.every))


@dataclass(frozen=True, slots=True)
class DiLoCo(Rival):
    every: int = 32
    rate: float = 0.7
    momentum: float = 0.9
    values: Values = "exact"

    loses: ClassVar[str] = "the outer step makes more or less way than the mean of the ranks' steps"

    def __post_init__(self) -> None:
        at_least(1, every=self.every)
        at_least(0, rate=self.rate, momentum=self.momentum)

    def begin(self, training: Training, ctx: Ctx) -> Part:
        scheme = Stripes(density=1.0, values=self.values)
        return OuterPart(training, ctx, scheme, _steps(self.every), self.rate, self.momentum)


@dataclass(frozen=True, slots=True)
class OneShot(Rival):
    def begin(self, training: Training, ctx: Ctx) -> Part:
        never = _steps(training.steps + 1)
        return EnginePart(training, ctx, Stripes(density=1.0, values="exact"), never)


@dataclass(frozen=True, slots=True)
class Sparta(Rival):
    density: float = 0.005

    def __post_init__(self) -> None:
        check_density(self.density)

    def begin(self, training: Training, ctx: Ctx) -> Part:
        return EnginePart(training, ctx, RandomK(density=self.density), _steps(1))


@dataclass(frozen=True, slots=True)
class OneBit(Rival):
    # Papers have gradients; of steps, any optimizer's travel
    exchange: Literal["gradients", "steps"] = "gradients"
    every: int = 1  # for steps alone: gradients are exchanged in every step

    def __post_init__(self) -> None:
        at_least(1, every=self.every)
        if self.every > 1 and self.exchange == "gradients":
            raise ConfigError(f"every={self.every} wants exchange=steps: gradients go in every step")

    def begin(self, training: Training, ctx: Ctx) -> Part:
        exchange = _steps(self.every) if self.exchange == "steps" else Gradients(small=0)
        return EnginePart(training, ctx, Stripes(density=1.0, values="sign"), exchange)


def _steps(every: int) -> Exchange:
    return Steps(every=every, small=0)
