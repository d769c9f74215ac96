"""Each kernel in its plainest form. Tests hold all others to these, ties and NaN included."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def is_finite(*tensors: Tensor) -> bool:
    """No NaN and no infinity in any of them."""
    return all(bool(x.isfinite().all()) for x in tensors)


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
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.long, device=x.device)


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


def accumulate(residual: Tensor, gradient: Tensor, scale: float, out: Tensor) -> bool:
    """out = scale * residual + gradient; whether all of it is finite."""
    out.copy_(residual * scale + gradient)
    return is_finite(out)


def residual(anchor: Tensor, own: Tensor, out: Tensor) -> None:
    """out = anchor - own; what is not finite counts as 0."""
    out.copy_(_waits(anchor, own))


def residual_above(anchor: Tensor, own: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Sorted indices where |residual| >= threshold, and the residual there."""
    waits = _waits(anchor, own)
    found = above(waits, threshold)
    return found, waits[found]


def apply(shared: Tensor, own: Tensor, anchor: Tensor, update: Tensor, spent: Tensor, world: int) -> None:
    """shared -= update / world, and the residual -= spent; what is not finite is dropped."""
    x = own.to(anchor.dtype)
    left = (anchor - x) - spent
    anchor.copy_(x + torch.where(left.isfinite(), left, 0.0))
    shared.copy_(shared - update / world)


def rebase(shared: Tensor, own: Tensor, anchor: Tensor, preview: float) -> None:
    """own = shared - preview * residual, rounded to its dtype; the anchor follows: same residual."""
    waits = _waits(anchor, own)
    own.copy_(shared - preview * waits)
    anchor.copy_(own + waits)


def _waits(anchor: Tensor, own: Tensor) -> Tensor:
    waits = anchor - own
    return torch.where(waits.isfinite(), waits, 0.0)


def select(x: Tensor, threshold: float, capacity: int, phase: float) -> tuple[Tensor, Tensor, Tensor]:
    """`capacity` of the sorted indices with |x| >= threshold, how many there are, and their log excess.

    Where there are more than fit, the run of them that starts at the share `phase` of what is too many;
    where there are fewer, filled up with x.numel(). Log excess is the sum of ln(|x| / threshold).
    """
    found = above(x, threshold)
    begin = math.floor(phase * max(found.numel() - capacity, 0))
    taken = found[begin : begin + capacity]
    indices = torch.full((capacity,), x.numel(), dtype=torch.int64, device=x.device)
    indices[: taken.numel()] = taken
    largest_float = torch.finfo(torch.float32).max
    tail = (x[found].abs() / threshold).log().sum().nan_to_num(nan=largest_float)
    demand = torch.tensor(found.numel(), dtype=torch.int64, device=x.device)
    return indices, demand, tail.clamp(0.0, largest_float).float()
