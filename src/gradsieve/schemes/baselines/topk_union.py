"""Top-k over the union: every rank's k largest elements are chosen for all ranks.

1. Select the k largest |acc| of this rank.
2. All-gather their indices.
3. All-reduce the values at the union of all indices, also those that a rank did not select itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather
from gradsieve.kernels import largest
from gradsieve.schemes.base import Agreed, Stateless, Values, sum_agreed
from gradsieve.types import Ctx, Outcome, Program, Sparse
from gradsieve.wire.check import rows_increasing
from gradsieve.wire.pairs import index_dtype


@dataclass(frozen=True, kw_only=True)
class Seen(Stateless):
    """These figures of the last step are for reports only: no step depends on them."""

    # Most elements that one rank selected.
    longest: int = 0
    # Elements that a rank selected, on average.
    mean: float = 0.0
    # Elements in the update.
    union: int = 0

    @property
    def imbalance(self) -> float:
        return self.longest / self.mean if self.mean else 1.0


@dataclass(frozen=True, kw_only=True)
class TopKUnion(Agreed[Seen]):
    def begin(self, n: int, world: int, previous: Seen | None = None) -> Seen:
        return Seen()

    def step(self, acc: Tensor, state: Seen, ctx: Ctx) -> Program[Outcome[Seen]]:
        k = self.k(acc.numel())
        # 1.
        chosen = largest(acc, k)
        # 2. and 3. A rank may have fewer than k non-zero elements.
        return (yield from reduce_union(acc, chosen, k, self.values, ctx))

    def report(self, state: Seen) -> Mapping[str, float]:
        return {"imbalance": state.imbalance}


def reduce_union(acc: Tensor, mine: Tensor, length: int, values: Values, ctx: Ctx) -> Program[Outcome[Seen]]:
    """Sums what every rank has where any rank picked, given how many elements a rank picks at most."""
    n = acc.numel()
    row = torch.full((length,), n, dtype=index_dtype(n), device=acc.device)
    row[: mine.numel()] = mine
    rows = yield AllGather(row)
    rows_increasing(rows, n, f"indices in step {ctx.step}")
    marks = torch.zeros(n + 1, dtype=torch.bool, device=acc.device)
    marks[rows.long()] = True  # no sorting: rows together can be many times n
    union = marks[:n].nonzero().flatten()
    total, given = yield from sum_agreed(acc[union], values, ctx)
    counts = (rows != n).sum(1)
    seen = Seen(longest=int(counts.max()), mean=int(counts.sum()) / counts.numel(), union=union.numel())
    return Outcome(Sparse(union, total, n), Sparse(union, given, n), seen)
