"""Each kernel in its plainest form. Tests hold `fast.py` to these, ties and NaN included."""

from __future__ import annotations

import torch
from torch import Tensor


def is_finite(x: Tensor) -> bool:
    """No NaN and no infinity in x."""
    return bool(x.isfinite().all())


def above(x: Tensor, threshold: float) -> Tensor:
    """Sorted indices with |x| >= threshold. NaN is never above."""
    return (x.abs() >= threshold).nonzero().flatten()


def largest(x: Tensor, k: int) -> Tensor:
    """Sorted indices of the k largest |x|, fewer where x has fewer non-zero elements."""
    magnitude, index = torch.topk(x.abs(), min(k, x.numel()))
    return index[magnitude != 0].sort().values


def sum_by_index(indices: Tensor, values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Sorted unique indices and, for each, its values added up in the order given."""
    total = torch.zeros(n, dtype=values.dtype, device=values.device)
    for index, value in zip(indices.tolist(), values, strict=True):
        total[index] += value
    present = torch.unique(indices)
    return present, total[present]
