"""Gaussian-k: the threshold is a quantile of the normal distribution that fits the vector.

1. Mean and standard deviation of acc.
2. Threshold: |mean| + z deviation, a normal variable being further from its mean than that with
   probability k/n.
3. While the count is outside 3k/4 .. 5k/4, at most twenty times: lower or raise the threshold by 2 %.
4. All-gather counts, then the entries; add up, in rank order, what the ranks sent for each index.

The corrections are those of the Ok-Topk authors' copy. The first release halves or raises by half, three
times at most, which overshoots and left a twentieth of k on normal gradients; and it does not select again
after its last correction, so that what it sends is not what its threshold says.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from gradsieve.schemes.baselines.topk_union import Seen
from gradsieve.types import Ctx, Outcome, Program
from gradsieve_tools.baselines.gathering import Gathering, at_least_one, gather_entries, reaching

_CORRECTIONS, _STEP = 20, 1.02
_FEW, _MANY = 0.75, 1.25


@dataclass(frozen=True, kw_only=True)
class GaussianK(Gathering[Seen]):
    def begin(self, n: int, world: int, previous: Seen | None = None) -> Seen:
        return Seen()

    def step(self, acc: Tensor, state: Seen, ctx: Ctx) -> Program[Outcome[Seen]]:
        mine = at_least_one(acc, select(acc, self.k(acc.numel())))
        # 4.
        update, spent, seen = yield from gather_entries(acc, mine, ctx)
        return Outcome(update, spent, seen)


def select(acc: Tensor, k: int) -> Tensor:
    """Sorted indices of about k of the largest elements."""
    threshold = estimate(acc, k)
    # 3. One look at acc, with the lowest threshold that the corrections can lead to.
    wide = reaching(acc, threshold / _STEP**_CORRECTIONS)
    magnitude = acc[wide].abs()
    ordered = magnitude.sort().values
    for _ in range(_CORRECTIONS):
        count = ordered.numel() - int(torch.searchsorted(ordered, threshold))
        if _FEW * k <= count <= _MANY * k:
            break
        threshold *= _STEP if count > k else 1 / _STEP
    return wide[magnitude >= threshold]


def estimate(acc: Tensor, k: int) -> float:
    """The threshold that k elements of acc reach, if they are normally distributed."""
    if not acc.numel():
        return 0.0
    # 1.
    deviation, mean = torch.std_mean(acc, correction=0)
    # 2. Selection is by magnitude, so that the sign of the mean must not matter.
    return abs(float(mean)) - NormalDist().inv_cdf(k / acc.numel() / 2) * float(deviation)
