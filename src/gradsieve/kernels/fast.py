"""The reference kernels with fewer passes over memory, in plain torch ops on the tensors' own device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_CHUNK = 1 << 17
"""Elements whose magnitudes and marks stay in a CPU core's cache between the passes over them."""

_WORD = 8
"""Marks looked at together: eight one-byte marks are one int64, and at low density most are zero."""

_SAMPLED = 50
"""Elements among the largest that a sample should contain."""
_FEWEST = 16
"""Of so many elements of a long block, at most one is sampled."""


def is_finite(x: Tensor) -> bool:
    """No NaN and no infinity in x.

    One pass: a sum over something that is not finite is not finite. The reverse can fail by overflow, so
    that a bad sum is looked at again element by element.
    """
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


def above(x: Tensor, threshold: float) -> Tensor:
    """Sorted indices with |x| >= threshold. NaN is never above."""
    if x.device.type != "cpu" or x.numel() < _CHUNK:
        return (x.abs() >= threshold).nonzero().flatten()
    body = x.numel() - x.numel() % _WORD
    marks = torch.empty(body, dtype=torch.bool)
    magnitude = torch.empty(_CHUNK, dtype=x.dtype)
    words = []
    for start in range(0, body, _CHUNK):
        stop = min(start + _CHUNK, body)
        torch.abs(x[start:stop], out=magnitude[: stop - start])
        chunk = torch.ge(magnitude[: stop - start], threshold, out=marks[start:stop])
        words.append(chunk.view(torch.int64).nonzero().flatten().add_(start // _WORD))
    hot = torch.cat(words)
    inside = marks.view(-1, _WORD)[hot].nonzero()
    found = hot[inside[:, 0]].mul_(_WORD).add_(inside[:, 1])
    tail = (x[body:].abs() >= threshold).nonzero().flatten().add_(body)
    return torch.cat([found, tail])


def largest(x: Tensor, k: int) -> Tensor:
    """Sorted indices of the k largest |x|, fewer where x has fewer elements that are neither zero nor NaN.

    Between equal magnitudes the lower index is taken. Exact, at about the price of a comparison: only what
    can be among the k largest is sorted.
    """
    k = min(k, x.numel())
    if k < 1:
        return torch.zeros(0, dtype=torch.long, device=x.device)
    there = candidates(x, x.numel(), k)
    if there.numel() <= k:
        return there
    order = x[there].abs().sort(descending=True, stable=True).indices
    return there[order[:k]].sort().values


def candidates(x: Tensor, length: int, count: int) -> Tensor:
    """Sorted indices of what can be among the `count` largest |x| of each block of `length` elements.

    A superset, of about twice as many: all elements above a threshold that a sample of the block suggests.
    """
    whole = x.numel() - x.numel() % length if length else 0
    found = []
    if whole:
        found.append(_candidates(x[:whole].reshape(-1, length), min(count, length)))
    if whole < x.numel():
        rest = x[whole:].reshape(1, -1)
        found.append(_candidates(rest, min(count, rest.numel())).add_(whole))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.long, device=x.device)


def _candidates(blocks: Tensor, count: int) -> Tensor:
    length = blocks.shape[1]
    sparse = _FEWEST if length > _FEWEST * _CHUNK // 8 else 1
    stride = max(sparse, count // _SAMPLED) | 1  # odd, so as not to fall into step with a matrix's rows
    wanted = count / stride
    rank = min(count, math.ceil(1.25 * wanted + 3 * math.sqrt(wanted)))
    sample = blocks[:, ::stride].abs().nan_to_num_(nan=0.0, posinf=torch.inf)
    smallest = torch.finfo(blocks.dtype).tiny * torch.finfo(blocks.dtype).eps  # the smallest denormal
    if rank >= sample.shape[1] and stride > 1:
        threshold = sample.new_zeros(len(blocks))
    else:
        threshold = sample.topk(rank, dim=1, sorted=False).values.amin(1)
    threshold.clamp_(min=smallest)
    found = _above_each(blocks, threshold)
    if stride == 1:
        return found
    enough = torch.bincount(found // length, minlength=len(blocks)) >= count
    missed = (~enough & (threshold > smallest)).nonzero().flatten().tolist()
    if not missed:
        return found
    for block in missed:  # the sample misled
        threshold[block] = blocks[block].abs().nan_to_num_(0.0, torch.inf).topk(count).values[-1]
    return _above_each(blocks, threshold.clamp_(min=smallest))


def _above_each(blocks: Tensor, threshold: Tensor) -> Tensor:
    """`above` for every row with its own threshold, as indices into the rows laid end to end."""
    count, length = blocks.shape
    if length >= _CHUNK:
        rows = [
            above(row, limit).add_(place * length)
            for place, (row, limit) in enumerate(zip(blocks, threshold.tolist(), strict=True))
        ]
        return torch.cat(rows)
    together = max(1, _CHUNK // length)
    found = []
    for first in range(0, count, together):
        group = slice(first, first + together)
        marks = blocks[group].abs() >= threshold[group, None]
        found.append(marks.flatten().nonzero().flatten().add_(first * length))
    return torch.cat(found)


def largest_of_each(magnitude: Tensor, block: Tensor, counts: Tensor) -> Tensor:
    """Places of the counts[b] largest magnitudes of every block b, sorted; `block` does not decrease.

    Between equal magnitudes the earlier place is taken.
    """
    order = magnitude.sort(descending=True, stable=True).indices
    order = order[block[order].sort(stable=True).indices]
    lengths = torch.bincount(block, minlength=counts.numel())
    rank = torch.arange(block.numel(), device=block.device) - (lengths.cumsum(0) - lengths)[block]
    return order[rank < counts[block]].sort().values


def sum_by_index(indices: Tensor, values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Sorted unique indices and, for each, its values added up in the order given.

    Sorting serves every device and is the same on each rank (`index_add_` on a GPU is not). On a CPU, with
    more entries than is worth sorting, adding into a dense vector is sequential too, and faster.
    """
    if indices.device.type == "cpu" and indices.numel() > n // 16:
        total = torch.zeros(n, dtype=values.dtype).index_add_(0, indices, values)
        marks = torch.zeros(n, dtype=torch.bool)
        marks[indices] = True
        present = marks.nonzero().flatten()
        return present, total[present]
    if not indices.numel():
        return indices, values
    ordered, order = indices.sort(stable=True)
    present, lengths = torch.unique_consecutive(ordered, return_counts=True)
    return present, torch.segment_reduce(values[order], "sum", lengths=lengths, initial=0)
