"""DeMo: each rank's momentum, of which the strongest frequencies are shared. arXiv 2411.19870.

1. Momentum of this rank alone:                        m = 0.999 m + rate g.
2. Each tensor in blocks of up to 64 x 64 (vectors: 64), their discrete cosine transform,
   and of it the k = 32 largest of each block:         q = top-k(DCT(m)).
3. What is sent is no longer this rank's own:          m = m - IDCT(q).
4. Every rank gathers all ranks' q, and takes the mean of each
   coefficient over those who sent it:                 Q = IDCT(mean of q).
5. Sign descent, decoupled weight decay:               w = (1 - rate decay) w - rate sign(Q).

It is an optimizer of its own: a task's rate, schedule and weight decay are taken from its optimizer, which
takes no step. All ranks have the same model at all times.

Differences. Values travel as bfloat16 and places coded; what rounding leaves stays in m. The authors' code
has a weight decay of 0 by default, here `weight_decay=0`; the task's is taken where none is given. It leaves
clipping to trainers, here `clip`, of this rank's gradient alone. Tensors of more than two dimensions are seen
as matrices of their first one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from gradsieve.schemes import AllGather, Ctx, Program
from gradsieve_tools.bench.rivals.base import Part, Rival, at_least
from gradsieve_tools.bench.rivals.entries import Entries
from gradsieve_tools.bench.tasks.training import Training


@dataclass(frozen=True, slots=True)
class DeMo(Rival):
    chunk: int = 64
    k: int = 32
    decay: float = 0.999
    weight_decay: float = -1.0  # below 0: the task's
    clip: float = math.inf  # largest norm of a rank's gradient

    loses: ClassVar[str] = "momentum that is not sent decays, and what is sent goes by its sign"

    def __post_init__(self) -> None:
        at_least(1, chunk=self.chunk, k=self.k)
        at_least(0, decay=self.decay, clip=self.clip)

    def begin(self, training: Training, ctx: Ctx) -> Part:
        return DeMoPart(self, training, ctx)


class Blocks:
    """A tensor as rows, one a block, of the coefficients of its blocks' cosine transforms."""

    def __init__(self, shape: torch.Size, chunk: int) -> None:
        self.rows, self.columns = shape[0] if len(shape) > 1 else 1, math.prod(shape[1:] or shape)
        self.height, self.width = _divisor(self.rows, chunk), _divisor(self.columns, chunk)
        self.down, self.across = cosines(self.height), cosines(self.width)

    @property
    def count(self) -> int:
        return self.rows * self.columns // self.size

    @property
    def size(self) -> int:
        return self.height * self.width

    def transform(self, tensor: Tensor) -> Tensor:
        blocks = tensor.reshape(-1, self.height, self.columns // self.width, self.width).transpose(1, 2)
        return (self.down @ blocks @ self.across.T).reshape(-1, self.size)

    def back(self, coefficients: Tensor) -> Tensor:
        across = self.columns // self.width
        blocks = self.down.T @ coefficients.view(-1, across, self.height, self.width) @ self.across
        return blocks.transpose(1, 2).reshape(-1)


class DeMoPart(Part):
    def __init__(self, rival: DeMo, training: Training, ctx: Ctx) -> None:
        super().__init__(training, ctx)
        self.rival = rival
        self.parameters = list(training.model.parameters())
        self.momenta = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.blocks = [Blocks(parameter.shape, rival.chunk) for parameter in self.parameters]
        self.entries = [
            Entries(each.count, each.size, min(rival.k, each.size), "bf16") for each in self.blocks
        ]

    def step(self, number: int) -> Program[None]:
        group = self.training.optimizer.param_groups[0]
        rate, weight_decay, messages = group["lr"], self.rival.weight_decay, []
        weight_decay = group["weight_decay"] if weight_decay < 0 else weight_decay
        torch.nn.utils.clip_grad_norm_(self.parameters, self.rival.clip)
        for parameter, momentum, blocks, entries in self._each():
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            momentum.mul_(self.rival.decay).add_(gradient, alpha=rate)  # 1.
            message = entries.encode(blocks.transform(momentum))  # 2.
            momentum -= blocks.back(entries.decode(message)).view_as(momentum)  # 3.
            messages.append(message)
        gathered = yield AllGather(torch.cat(messages))  # 4.
        parts = torch.split(gathered, [entries.size for entries in self.entries], dim=1)
        with torch.no_grad():
            for (parameter, _, blocks, entries), rows in zip(self._each(), parts, strict=True):
                sent = torch.stack([entries.decode(row) for row in rows])
                total = sent.sum(0) / (sent != 0).sum(0).clamp_min(1)
                parameter.mul_(1.0 - rate * weight_decay)  # 5.
                parameter.sub_(blocks.back(total).sign_().view_as(parameter), alpha=rate)
        self.training.optimizer.zero_grad()
        self.take_step()  # of the schedule: without gradients the optimizer takes none

    def finish(self) -> Program[None]:
        yield from ()

    def _each(self) -> list[tuple[Tensor, Tensor, Blocks, Entries]]:
        return list(zip(self.parameters, self.momenta, self.blocks, self.entries, strict=True))


@cache
def cosines(n: int) -> Tensor:
    """The orthonormal discrete cosine transform (DCT-II) of n elements, as a matrix."""
    place = torch.arange(n, dtype=torch.float64, device="cpu")
    matrix = torch.cos(math.pi * (place + 0.5) * place[:, None] / n) * math.sqrt(2.0 / n)
    matrix[0] /= math.sqrt(2.0)
    return matrix.float()


def _divisor(n: int, most: int) -> int:
    """The largest up to `most`."""
    return next(size for size in range(min(n, most), 0, -1) if n % size == 0)
