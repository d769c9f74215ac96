"""Top-k with all-gather (TopkA): every rank sends its own k largest elements to everybody.

Traffic grows with the number of ranks, and so does the number of elements that come back (up to k P).

1. Select the k largest |acc| of this rank.
2. All-gather indices and values in one message.
3. Add up, in rank order, what the ranks sent for each index.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradsieve.comm.ops import AllGather
from gradsieve.kernels import largest
from gradsieve.schemes.base import Scheme, Stateless
from gradsieve.schemes.gathering import pack_entries, sum_entries
from gradsieve.types import Ctx, Outcome, Program, Sparse


@dataclass(frozen=True, kw_only=True)
class TopK(Scheme[Stateless]):
    def begin(self, n: int, world: int, previous: Stateless | None = None) -> Stateless:
        return Stateless()

    def step(self, acc: Tensor, state: Stateless, ctx: Ctx) -> Program[Outcome[Stateless]]:
        n = acc.numel()
        # 1.
        mine = largest(acc, self.k(n))
        values = acc[mine]
        # 2. A rank may have fewer than k non-zero elements.
        messages = yield AllGather(pack_entries(mine, values, self.k(n), n))
        # 3.
        update = sum_entries(messages, n, acc.dtype, ctx)
        return Outcome(update, Sparse(mine, values, n), state)
