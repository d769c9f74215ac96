"""Adam whose momentum, or whose steps, travel in one bit, once its second moments are frozen.

    one-bit-adam    1-bit Adam, arXiv 2102.02888
    zero-one-adam   0/1 Adam, arXiv 2202.06009

1. Until `freeze` of the steps: Adam on the mean gradient. 0/1 Adam has it exact, and forms v, in `kappa`
   steps next to each other, then in `kappa` every second step, every fourth, and so on; in one bit in others.
2. From then on v stays. 1-bit Adam:  m = b1 m + (1 - b1) g on each rank; m = mean of m in one bit.
3. 0/1 Adam takes local steps instead, m as in 2 but of this rank alone, and u = sum of rate m: a rank is at
   w - u / sqrt(v). Every H steps u = mean of u in one bit; w = w - u / sqrt(v); m = u / (sum of rates), and
   u = 0. H is 1 at first and doubles after each `doubling` of the steps, up to `every`.

What rounding leaves, of a rank's own values and of the sums that it owns, is added the next time; it begins
at 0 again in 2 and 3. Each is an optimizer of its own: rate, schedule, betas and weight decay are those of
the task's, which takes no step.

Differences. Both moments are corrected for their beginning at 0, which DeepSpeed leaves out: of 2,000 steps
it would be a large part. Parts of a training stand where DeepSpeed has numbers of steps. Signs have a scale
for 256 elements, not one for each tensor. Weights decay in w, not in u. Elements whose v is 0 do not move
(DeepSpeed: a mask that users give).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradsieve.schemes import Ctx, Program
from gradsieve_tools.bench.rivals.base import Part, Rival, at_least, flat, mean, rounded_mean, write
from gradsieve_tools.bench.tasks.training import Training


@dataclass(frozen=True, slots=True)
class OneBitAdam(Rival):
    freeze: float = 0.15

    loses: ClassVar[str] = "it is an optimizer of its own, whose moments are shared instead of ranks' steps"

    def __post_init__(self) -> None:
        at_least(0, freeze=self.freeze)

    def begin(self, training: Training, ctx: Ctx) -> Part:
        return OneBitAdamPart(training, ctx, self.freeze)


@dataclass(frozen=True, slots=True)
class ZeroOneAdam(Rival):
    freeze: float = 0.05
    kappa: int = 16
    every: int = 16
    doubling: float = 0.1

    loses: ClassVar[str] = OneBitAdam.loses

    def __post_init__(self) -> None:
        at_least(0, freeze=self.freeze, doubling=self.doubling)
        at_least(1, kappa=self.kappa, every=self.every)

    def begin(self, training: Training, ctx: Ctx) -> Part:
        return ZeroOneAdamPart(self, training, ctx)


class OneBitAdamPart(Part):
    def __init__(self, training: Training, ctx: Ctx, freeze: float) -> None:
        super().__init__(training, ctx)
        self.frozen_from = max(1, round(freeze * training.steps))  # the last step that forms v
        self.model = flat(training.model)
        self.m, self.v, self.error = (torch.zeros_like(self.model) for _ in range(3))
        self.formed = 0  # gradients averaged into v
        group = training.optimizer.param_groups[0]
        self.betas, self.eps = group.get("betas", (0.9, 0.999)), group.get("eps", 1e-8)

    @property
    def group(self) -> dict[str, float]:
        return self.training.optimizer.param_groups[0]

    def step(self, number: int) -> Program[None]:
        gradient = torch.cat([_gradient(parameter) for parameter in self.training.model.parameters()])
        if number <= self.frozen_from:
            yield from self._adam(gradient, number)  # 1.
            if number == self.frozen_from:
                self.error.zero_()
        else:
            yield from self._frozen(gradient, number)  # 2., 3.
        write(self.training.model, self._shown())
        self.training.optimizer.zero_grad()
        self.take_step()  # of the schedule: without gradients the optimizer takes none

    def finish(self) -> Program[None]:
        yield from ()

    def _shown(self) -> Tensor:
        """The model that this rank's next gradient is of."""
        return self.model

    def _adam(self, gradient: Tensor, number: int) -> Program[None]:
        shared = yield from mean(gradient, self.world)
        self._form(shared)
        self._remember(shared)
        self._move(self._wanted(number))

    def _frozen(self, gradient: Tensor, number: int) -> Program[None]:
        self._remember(gradient)
        self.m = yield from self._in_one_bit(self.m, number)
        self._move(self._wanted(number))

    def _form(self, gradient: Tensor) -> None:
        self.v.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
        self.formed += 1

    def _remember(self, gradient: Tensor) -> None:
        self.m.mul_(self.betas[0]).add_(gradient, alpha=1 - self.betas[0])

    def _in_one_bit(self, values: Tensor, number: int) -> Program[Tensor]:
        ctx = Ctx(self.rank, self.world, number)
        shared, self.error = yield from rounded_mean(values + self.error, "sign", ctx)
        return shared

    def _scale(self) -> Tensor:
        """Return what a step is divided by; infinite where no gradient ever was."""
        scale = (self.v / (1 - self.betas[1] ** self.formed)).sqrt_().add_(self.eps)
        found: Tensor = scale.masked_fill_(self.v == 0, torch.inf)
        return found

    def _wanted(self, number: int) -> Tensor:
        """The step of this rank's moments, times 1 / rate."""
        corrected: Tensor = self.m / (1 - self.betas[0] ** number)
        return corrected / self._scale()

    def _move(self, wanted: Tensor) -> None:
        self.model.mul_(1 - self.group["lr"] * self.group["weight_decay"])
        self.model.sub_(wanted, alpha=self.group["lr"])


class ZeroOneAdamPart(OneBitAdamPart):
    def __init__(self, rival: ZeroOneAdam, training: Training, ctx: Ctx) -> None:
        super().__init__(training, ctx, rival.freeze)
        self.rival = rival
        # this rank's movement and the sum of its rates since the last exchange
        self.u, self.rates = torch.zeros_like(self.model), 0.0

    def _adam(self, gradient: Tensor, number: int) -> Program[None]:
        if number % 2 ** (self.formed // self.rival.kappa) == 0:
            yield from super()._adam(gradient, number)
            return
        self._remember((yield from self._in_one_bit(gradient, number)))
        self._move(self._wanted(number))

    def _frozen(self, gradient: Tensor, number: int) -> Program[None]:
        self._remember(gradient)
        self.u.add_(self.m, alpha=self.group["lr"])
        self.rates += self.group["lr"]
        shared = torch.zeros_like(self.u)
        since = (number - self.frozen_from - 1) / max(1.0, self.rival.doubling * self.training.steps)
        period = min(self.rival.every, 2 ** int(since))
        if number % period == 0 or number == self.training.steps:
            shared = yield from self._in_one_bit(self.u, number)
            self.m = shared / self.rates
            self.u, self.rates = torch.zeros_like(self.u), 0.0
        self.model.mul_(1 - self.group["lr"] * self.group["weight_decay"])
        self.model.sub_(shared / self._scale())

    def _shown(self) -> Tensor:
        return self.model - self.u / self._scale()


def _gradient(parameter: Tensor) -> Tensor:
    return (parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)).flatten()
