"""Top-k with all-gather (TopkA): every rank sends its own k largest elements to everybody.

Traffic grows with the number of ranks, and so does the number of elements that come back (up to k P).

1. Select the k largest |acc| of this rank.
2. All-gather indices and values in one message.
3. Add up, in rank order, what the ranks sent for each index.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather
from gradsieve.kernels import largest, sum_by_index
from gradsieve.schemes.base import Scheme, Stateless, log2_ceil
from gradsieve.types import Ctx, Outcome, Program, Sparse
from gradsieve.wire.check import rows_increasing
from gradsieve.wire.frame import from_bits, index_dtype, to_bits


@dataclass(frozen=True, kw_only=True)
class TopK(Scheme[Stateless]):
    def begin(self, n: int, world: int, previous: Stateless | None = None) -> Stateless:
        return Stateless()

    def step(self, acc: Tensor, state: Stateless, ctx: Ctx) -> Program[Outcome[Stateless]]:
        n = acc.numel()
        # 1.
        mine = largest(acc, self.k(n))
        values = acc[mine]
        # 2. A rank with fewer than k non-zero elements fills up with index n, which is nowhere.
        message = torch.full((2, self.k(n)), n, dtype=index_dtype(n, acc.dtype), device=acc.device)
        message[0, : mine.numel()] = mine
        message[1, : mine.numel()] = to_bits(values)
        gathered = yield AllGather(message)
        # 3.
        rows_increasing(gathered[:, 0], n, f"indices in step {ctx.step}")
        present = gathered[:, 0].flatten() != n
        indices = gathered[:, 0].flatten()[present].long()
        sent = from_bits(gathered[:, 1].flatten()[present], acc.dtype)
        picked, total = sum_by_index(indices, sent, n)
        return Outcome(Sparse(picked, total, n), Sparse(mine, values, n), state)

    def expected_words(self, n: int, world: int, state: Stateless | None = None) -> float:
        return 2.0 * self.k(n) * (world - 1)

    def expected_rounds(self, n: int, world: int, state: Stateless | None = None) -> int:
        return log2_ceil(world)
