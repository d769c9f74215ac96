"""No communication at all: every rank keeps its own gradient. The limit that the other schemes chase.

Replicas drift apart, so this is for measuring only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradsieve.schemes.base import Scheme, Stateless
from gradsieve.types import Ctx, Outcome, Program, Sparse


@dataclass(frozen=True, kw_only=True)
class Noop(Scheme[Stateless]):
    density: float = 1.0

    lossless: ClassVar[bool] = True
    no_comm: ClassVar[bool] = True

    def begin(self, n: int, world: int, previous: Stateless | None = None) -> Stateless:
        return Stateless()

    def step(self, acc: Tensor, state: Stateless, ctx: Ctx) -> Program[Outcome[Stateless]]:
        yield from ()  # a generator that asks for nothing
        return Outcome(Sparse.full(acc), Sparse.full(acc), state)
