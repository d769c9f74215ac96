"""SparseLoCo: what H local steps moved, its largest few, in two bits. arXiv 2508.15706.

1. Every rank's AdamW takes H steps from the shared model w:   D = w - x.
2. Error feedback that forgets:                                e = 0.95 e + D.
3. The 64 largest of each chunk of 4,096 elements, in 2 bits:  S = Q(top-k(e)).
4. What was sent is taken off:                                 e = e - S.
5. Every rank gathers all ranks' S.
6. Outer SGD on their mean:                                    w = w - rate mean(S); all ranks go on from w.

Differences. Chunks are cut from all parameters concatenated, not from each tensor as squares of 64 x 64.
Q is our codec of two bits (sign, one of two magnitudes, a scale for 256 values), where the authors' has four
levels at the means of bins. Their trainings clip a peer's message to the median norm of all, which is against
hostile peers: no rank does here. What is left in e at the end is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradsieve.errors import ConfigError
from gradsieve.schemes import AllGather, Ctx, Program, Values
from gradsieve_tools.bench.rivals.base import Part, Rival, at_least, flat, write
from gradsieve_tools.bench.rivals.entries import Entries
from gradsieve_tools.bench.tasks.training import Training


@dataclass(frozen=True, slots=True)
class SparseLoCo(Rival):
    every: int = 15
    chunk: int = 4096
    k: int = 64
    decay: float = 0.95
    rate: float = 1.0
    values: Values = "int2"

    loses: ClassVar[str] = "error feedback forgets 5 % an exchange, on purpose: it takes momentum's place"

    def __post_init__(self) -> None:
        at_least(1, every=self.every, k=self.k, chunk=self.chunk)
        at_least(0, decay=self.decay, rate=self.rate)
        if self.k > self.chunk:
            raise ConfigError(f"k is at most the chunk, {self.chunk}, not {self.k}")

    def begin(self, training: Training, ctx: Ctx) -> Part:
        return SparseLoCoPart(self, training, ctx)


class SparseLoCoPart(Part):
    def __init__(self, rival: SparseLoCo, training: Training, ctx: Ctx) -> None:
        super().__init__(training, ctx)
        self.rival, self.n = rival, training.n
        chunks = -(-self.n // rival.chunk)
        self.entries = Entries(chunks, rival.chunk, rival.k, rival.values)
        self.shared = flat(training.model)
        # padded to whole chunks
        self.error = torch.zeros(chunks * rival.chunk, dtype=self.shared.dtype, device=self.shared.device)

    def step(self, number: int) -> Program[None]:
        self.take_step()
        if number % self.rival.every == 0 or number == self.training.steps:
            yield from self._exchange()

    def _exchange(self) -> Program[None]:
        # 1.
        moved = self.shared - flat(self.training.model)
        # 2.
        self.error.mul_(self.rival.decay)
        self.error[: self.n] += moved
        # 3.
        message = self.entries.encode(self.error.view(self.entries.chunks, -1))
        # 4.
        self.error -= self.entries.decode(message).flatten()
        self.error[self.n :] = 0.0  # in two bits nothing is 0, not even what fills up
        # 5.
        messages = yield AllGather(message)
        # 6.
        total = torch.stack([self.entries.decode(each).flatten() for each in messages]).sum(0)
        self.shared -= self.rival.rate * total[: self.n] / self.world
        write(self.training.model, self.shared)

    def finish(self) -> Program[None]:
        yield from ()
