"""CLT-k (ScaleCom, arXiv 2104.11125) without its low-pass filter: one rank chooses for all.

1. In step t rank t mod P leads and selects its k largest |acc|.
2. It broadcasts their indices.
3. Sum the values at those indices.

Where the leader has nothing to send, nothing is sent in that step: leaders change round robin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.comm.ops import Broadcast
from gradsieve.kernels import largest
from gradsieve.schemes.base import Agreed, Stateless, sum_agreed
from gradsieve.types import Ctx, Outcome, Program, Sparse
from gradsieve.wire.check import row_increasing
from gradsieve.wire.pairs import index_dtype


@dataclass(frozen=True, kw_only=True)
class CltK(Agreed[Stateless]):
    def begin(self, n: int, world: int, previous: Stateless | None = None) -> Stateless:
        return Stateless()

    def step(self, acc: Tensor, state: Stateless, ctx: Ctx) -> Program[Outcome[Stateless]]:
        n, leader = acc.numel(), ctx.step % ctx.world
        row = torch.full((self.k(n),), n, dtype=index_dtype(n), device=acc.device)
        # 1. With fewer than k non-zero elements it fills up with index n, which is nowhere.
        if ctx.rank == leader:
            chosen = largest(acc, self.k(n))
            row[: chosen.numel()] = chosen
        # 2.
        row = yield Broadcast(row, root=leader)
        row_increasing(row, n, f"indices in step {ctx.step} of the leader, rank {leader}")
        picked = row[row != n].long()
        # 3.
        total, given = yield from sum_agreed(acc[picked], self.values, ctx)
        return Outcome(Sparse(picked, total, n), Sparse(picked, given, n), state)
