"""DiLoCo whose model is exchanged in fragments that take turns, and DiLoCo with Muon inside.

    streaming   Streaming DiLoCo, arXiv 2501.18512: fragments, delay, mixing, 4 bits
    muloco      MuLoCo, arXiv 2505.23725: Muon inside, all of the model at once, 4 bits, error feedback

1. Every rank's optimizer takes steps on its own model x. A fragment's turn comes every H steps, and the turns
   of two fragments are H / fragments steps apart.
2. In its turn, what the fragment moved since the last:    D = w - x + decay e    (e: left by rounding, or 0)
   Its mean over ranks in few bits:                        d = mean(D)
3. `delay` steps later the outer step, Nesterov:           v = momentum v + d;  w = w - rate (d + momentum v)
4. The rank's own fragment is mixed with the shared one:   x = alpha x + (1 - alpha) w.

At the end fragments that moved since are exchanged once more, without delay and with alpha = 0: all ranks
have one model.

Differences. Fragments are whole tensors in the model's order, about equally large, where the paper deals out
layers. Four bits are our codec's, with a scale for 256 values, and the mean is rounded on the way back too;
the paper has a float of 3 bits of exponent, and its sums travel as they are. Muon is torch's, on all matrices
but embeddings and the head, at 0.2 sqrt(longer side) times AdamW's rate, so that one rate suits both; the
authors have sqrt(rows / columns) and look for its rate. Query, key and value are one matrix in our model.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import nn

from gradsieve.errors import ConfigError
from gradsieve.schemes import Ctx, Program, Values
from gradsieve_tools.bench.rivals.base import Part, Rival, at_least, flat, rounded_mean, write
from gradsieve_tools.bench.tasks.training import Training


@dataclass(frozen=True, slots=True)
class Streaming(Rival):
    every: int = 30
    fragments: int = 3
    delay: int = 1
    alpha: float = 0.5
    rate: float = 0.4
    momentum: float = 0.9
    values: Values = "int4"
    decay: float = 0.0

    loses: ClassVar[str] = "the outer step makes more or less way than the mean of the ranks' steps"

    def __post_init__(self) -> None:
        at_least(1, every=self.every, fragments=self.fragments)
        at_least(0, delay=self.delay, rate=self.rate, momentum=self.momentum, decay=self.decay)
        if not (self.fragments <= self.every > self.delay and 0 <= self.alpha <= 1):
            raise ConfigError("every is above delay and at least fragments, alpha from 0 to 1")

    def begin(self, training: Training, ctx: Ctx) -> Part:
        return StreamingPart(self, training, ctx)


@dataclass(frozen=True, slots=True)
class MuLoCo(Rival):
    every: int = 30
    rate: float = 0.8
    momentum: float = 0.9
    values: Values = "int4"
    decay: float = 0.9
    inner: float = 0.9  # Muon's own momentum

    loses: ClassVar[str] = Streaming.loses

    def __post_init__(self) -> None:
        at_least(0, inner=self.inner)
        self.outer()  # refuses the rest

    def outer(self) -> Streaming:
        return Streaming(self.every, 1, 0, 0.0, self.rate, self.momentum, self.values, self.decay)

    def begin(self, training: Training, ctx: Ctx) -> Part:
        return MuLoCoPart(self.outer(), training, ctx, self.inner)


class StreamingPart(Part):
    def __init__(self, rival: Streaming, training: Training, ctx: Ctx) -> None:
        super().__init__(training, ctx)
        self.rival = rival
        self.shared = flat(training.model)
        self.velocity, self.error = torch.zeros_like(self.shared), torch.zeros_like(self.shared)
        self.fragments = fragments(training.model, rival.fragments)
        self.under_way: list[tuple[int, slice, torch.Tensor]] = []  # step in which it is due, slice, mean

    def step(self, number: int) -> Program[None]:
        self.take_step()  # 1.
        for turn, fragment in enumerate(self.fragments):
            if self._has_turn(turn, number):
                mean = yield from self._mean(fragment, number)
                self.under_way.append((number + self.rival.delay, fragment, mean))
        while self.under_way and self.under_way[0][0] == number:
            self._apply(*self.under_way.pop(0)[1:], self.rival.alpha)

    def finish(self) -> Program[None]:
        while self.under_way:
            self._apply(*self.under_way.pop(0)[1:], self.rival.alpha)
        steps, local = self.training.steps, self.rival.delay > 0 or self.rival.alpha > 0
        for turn, fragment in enumerate(self.fragments):
            if local or not self._has_turn(turn, steps):
                mean = yield from self._mean(fragment, steps)
                self._apply(fragment, mean, alpha=0.0)

    def _has_turn(self, turn: int, number: int) -> bool:
        return (number + turn * self.rival.every // len(self.fragments)) % self.rival.every == 0

    def _mean(self, fragment: slice, number: int) -> Program[torch.Tensor]:
        """2."""
        moved = (self.shared - flat(self.training.model))[fragment] + self.error[fragment]
        mean, left = yield from rounded_mean(moved, self.rival.values, Ctx(self.rank, self.world, number))
        self.error[fragment] = self.rival.decay * left
        return mean

    def _apply(self, fragment: slice, mean: torch.Tensor, alpha: float) -> None:
        shared, velocity, own = self.shared[fragment], self.velocity[fragment], flat(self.training.model)
        velocity.mul_(self.rival.momentum).add_(mean)
        shared.sub_(mean.add(velocity, alpha=self.rival.momentum), alpha=self.rival.rate)  # 3.
        own[fragment] = shared.lerp(own[fragment], alpha)  # 4.
        write(self.training.model, own)


class MuLoCoPart(StreamingPart):
    def __init__(self, rival: Streaming, training: Training, ctx: Ctx, momentum: float) -> None:
        super().__init__(rival, training, ctx)
        self.matrices = matrices(training.model)
        decay = training.optimizer.param_groups[0]["weight_decay"]
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError("muloco needs torch 2.9 or later, which has Muon")
        self.muon: torch.optim.Optimizer = torch.optim.Muon(
            self.matrices,
            momentum=momentum,
            weight_decay=decay,
            nesterov=False,
            adjust_lr_fn="match_rms_adamw",
        )

    def take_step(self) -> None:
        self.muon.param_groups[0]["lr"] = self.training.optimizer.param_groups[0]["lr"]
        self.muon.step()
        for parameter in self.matrices:
            parameter.grad = None  # so that the task's own optimizer leaves it alone
        super().take_step()


def fragments(model: nn.Module, count: int) -> list[slice]:
    """Cut the flat parameters between tensors, next to even places."""
    ends = torch.tensor([p.numel() for p in model.parameters()], dtype=torch.int64, device="cpu").cumsum(0)
    total = int(ends[-1])
    cuts = [int(ends[(ends - total * part // count).abs().argmin()]) for part in range(1, count)]
    edges = sorted({0, *cuts, total})
    return [slice(start, stop) for start, stop in pairwise(edges)]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Hidden ones: no embedding, no table of the model itself, and not the last, which is the head."""
    found = [
        parameter
        for module in model.modules()
        if module is not model and not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 2
    ]
    return found[:-1]
