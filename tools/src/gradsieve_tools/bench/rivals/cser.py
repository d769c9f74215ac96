"""CSER: local models that are synchronised in part, and their errors reset. arXiv 2007.13221 (M-CSER: with
momentum, inside the rank's own optimizer).

PSync of v by C: blocks that C picks, the same on all ranks, become their mean; r is the rest of v.

1. p = the step that this rank's optimizer makes.
2. p', r = PSync(p, C2): x = x - p', e = e - r.
3. Every H-th step the errors are reset: e', r = PSync(e, C1); x = x - e + e', e = r.

x - e is the same on all ranks at all times. C1 and C2 pick blocks at random, one in r1 and one in r2 (GRBS),
so that 1/r2 + 1/(r1 H) of the model travels in a step: 1/32 as it stands here, half of it in each.

Differences. The paper's p is SGD's, with Nesterov momentum or none; here it is what the task's optimizer
moves. At the end the models are averaged, which resets all errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.schemes import Ctx, Program
from gradsieve_tools.bench.rivals.base import Part, Rival, at_least, flat, mean, write
from gradsieve_tools.bench.tasks.training import Training

_MODELS, _STEPS = 1, 2  # for which of the two PSyncs blocks are drawn


@dataclass(frozen=True, slots=True)
class Cser(Rival):
    every: int = 8
    r1: int = 8
    r2: int = 64
    block: int = 256

    def __post_init__(self) -> None:
        at_least(1, every=self.every, r1=self.r1, r2=self.r2, block=self.block)

    def begin(self, training: Training, ctx: Ctx) -> Part:
        return CserPart(self, training, ctx)


class CserPart(Part):
    def __init__(self, rival: Cser, training: Training, ctx: Ctx) -> None:
        super().__init__(training, ctx)
        self.rival = rival
        self.model = flat(training.model)
        self.error = torch.zeros_like(self.model)

    def step(self, number: int) -> Program[None]:
        self.take_step()
        moved = self.model - flat(self.training.model)  # 1.
        picked = self._picked(number, self.rival.r2, _STEPS)
        rest = yield from self._in_part(moved, picked)
        self.model -= moved
        self.error -= rest  # 2.
        if number % self.rival.every == 0:
            yield from self._reset(self._picked(number, self.rival.r1, _MODELS))  # 3.
        write(self.training.model, self.model)

    def finish(self) -> Program[None]:
        self.model = yield from mean(self.model, self.world)
        write(self.training.model, self.model)

    def _reset(self, picked: Tensor) -> Program[None]:
        self.model -= self.error
        rest = yield from self._in_part(self.error, picked)
        self.model += self.error
        self.error = rest

    def _in_part(self, values: Tensor, picked: Tensor) -> Program[Tensor]:
        """PSync, in place; returns what was not synchronised."""
        rest = values.masked_fill(picked, 0.0)
        values[picked] = yield from mean(values[picked], self.world)
        return rest

    def _picked(self, number: int, ratio: int, which: int) -> Tensor:
        """Elements of one block in `ratio`, at random, from the step's number alone."""
        n, block = self.model.numel(), self.rival.block
        blocks = -(-n // block)
        source = torch.Generator().manual_seed(4 * number + which)
        order = torch.randperm(blocks, dtype=torch.int64, device=source.device, generator=source)
        marks = torch.zeros(blocks, dtype=torch.bool, device=self.model.device)
        marks[order[: -(-blocks // ratio)].to(marks.device)] = True
        return marks.repeat_interleave(block)[:n]
