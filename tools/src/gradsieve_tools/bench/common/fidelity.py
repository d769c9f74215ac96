"""How good an update is, whatever it cost: the energy it captures, and what it leaves behind.

    A   what all ranks together could have sent: the sum over ranks of acc
    S   the update
    K   elements in the update

Taking S out of A lowers the squared norm of what is left by |A|^2 - |A - S|^2. No update of K elements lowers
it by more than the K largest A_j^2, the top-k of the sum, so that a share of 1 is the best there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradsieve.schemes import Sparse


def captured(total: Tensor, update: Sparse) -> float:
    """Energy that the update takes out of `total` over the most that as many elements can; at most 1.

    It is below 0 where an update adds more than it takes away. An empty update captures nothing.
    """
    if not update.count:
        return 0.0
    ideal = torch.topk(total.square(), update.count, sorted=False).values.sum()
    if not ideal:
        return 1.0  # there was nothing to capture
    return float(taken(total, update) / ideal)


def taken(total: Tensor, update: Sparse) -> Tensor:
    """Energy that the update takes out of `total`: |A|^2 - |A - S|^2, without the elements not in S."""
    return (update.values * (2 * total[update.where] - update.values)).sum()


def differs_from_top_k(total: Tensor, update: Tensor, k: int, new: Tensor) -> float:
    """Ok-Topk's xi, by Assumption 1 of its paper: |Topk(A) - S| over the norm of what is new in A."""
    best = torch.topk(total.abs(), k, sorted=False).indices
    apart = -update
    apart[best] += total[best]
    return float(apart.norm() / new.norm()) if new.any() else 0.0


def left_behind(residual: Tensor, gradient: Tensor) -> float:
    """Norm of the residual over that of this step's gradient, both summed (or averaged) over ranks."""
    return float(residual.norm() / gradient.norm())


def imbalance(report: Mapping[str, float], spent: Sequence[int]) -> float:
    """Most elements that one rank selected over the mean: as the scheme reports it, else of those spent."""
    if "imbalance" in report:
        return report["imbalance"]
    return max(spent) * len(spent) / sum(spent) if sum(spent) else 1.0
