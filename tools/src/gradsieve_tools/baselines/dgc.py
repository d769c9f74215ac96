"""DGC (arXiv 1712.01887), its selection: the threshold is read off a small sample.

1. Sample about 1 % of |acc| at equal distances, beginning at another place every step.
2. Threshold: the k/n quantile of the sample.
3. Fewer than 0.8 k reach it: times 0.8 and again, at most ten times.
4. More than 1.3 k reach it: the exact k largest among those.
5. All-gather counts, then the entries; add up, in rank order, what the ranks sent for each index.

Momentum correction, clipping and warm-up of the density belong to the optimiser and are not here. Of a count
between k and 1.3 k the release sends the first k by position, which starves the end of every tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.kernels import largest
from gradsieve.schemes.baselines.topk_union import Seen
from gradsieve.types import Ctx, Outcome, Program
from gradsieve_tools.baselines.gathering import Gathering, at_least_one, gather_entries, reaching

_SHARE = 0.01
# Elements of the sample that should reach the threshold: the count then errs by a fifth or so.
_ABOVE = 32
_FEW, _MANY = 0.8, 1.3
_LOWER, _CORRECTIONS = 0.8, 10


@dataclass(frozen=True, kw_only=True)
class Dgc(Gathering[Seen]):
    def begin(self, n: int, world: int, previous: Seen | None = None) -> Seen:
        return Seen()

    def step(self, acc: Tensor, state: Seen, ctx: Ctx) -> Program[Outcome[Seen]]:
        k = self.k(acc.numel())
        mine = at_least_one(acc, select(acc, k, ctx.step))
        # 5.
        update, spent, seen = yield from gather_entries(acc, mine, ctx, most=max(1, int(_MANY * k)))
        return Outcome(update, spent, seen)


def select(acc: Tensor, k: int, step: int) -> Tensor:
    """Sorted indices of about k of the largest elements."""
    threshold = estimate(acc, k, step)
    mine = reaching(acc, threshold)
    # 3.
    for _ in range(_CORRECTIONS):
        if mine.numel() >= _FEW * k:
            break
        threshold *= _LOWER
        mine = reaching(acc, threshold)
    # 4.
    return mine[largest(acc[mine], k)] if mine.numel() > _MANY * k else mine


def estimate(acc: Tensor, k: int, step: int) -> float:
    """The threshold that k elements of acc reach, if the sample is like the whole."""
    n = acc.numel()
    if not n:
        return 0.0
    # 1. An odd distance: rows of weights have even lengths, and the sample should not keep to one column.
    size = max(_SHARE * n, _ABOVE * n / k)
    distance = (max(1, int(n / size)) - 1) | 1
    sample = acc[step % distance :: distance].abs()
    # 2.
    kept = max(1, round(sample.numel() * k / n))
    return float(torch.topk(sample, kept, sorted=False).values.min())
