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
    """Sorted indices of the k largest |x|, fewer where x has fewer elements that are neither zero nor NaN.

    Between equal magnitudes the lower index is taken.
    """
    magnitude = torch.where(x.isnan(), 0.0, x.abs())
    values, order = magnitude.sort(descending=True, stable=True)
    return order[:k][values[:k] != 0].sort().values


def candidates(x: Tensor, length: int, count: int) -> Tensor:
    """Sorted indices of what can be among the `count` largest |x| of each block of `length` elements."""
    blocks = torch.split(x, length) if length else ()
    starts = range(0, x.numel(), length or 1)
    found = [largest(block, count) + start for start, block in zip(starts, blocks, strict=True)]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.long)


def largest_of_each(magnitude: Tensor, block: Tensor, counts: Tensor) -> Tensor:
    """Places of the counts[b] largest magnitudes of every block b, sorted; `block` does not decrease."""
    taken = []
    for number, count in enumerate(counts.tolist()):
        places = (block == number).nonzero().flatten()
        order = magnitude[places].sort(descending=True, stable=True).indices
        taken.append(places[order[:count]])
    return torch.cat(taken).sort().values


def sum_by_index(indices: Tensor, values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Sorted unique indices and, for each, its values added up in the order given."""
    total = torch.zeros(n, dtype=values.dtype, device=values.device)
    for index, value in zip(indices.tolist(), values, strict=True):
        total[index] += value
    present = torch.unique(indices)
    return present, total[present]
