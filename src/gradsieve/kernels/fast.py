"""The reference kernels with fewer passes over memory, in plain torch ops on the tensors' own device."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 17
"""Elements whose magnitudes and marks stay in a CPU core's cache between the passes over them."""

_WORD = 8
"""Marks looked at together: eight one-byte marks are one int64, and at low density most are zero."""


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
    """Sorted indices of the k largest |x|, fewer where x has fewer non-zero elements."""
    magnitude, index = torch.topk(x.abs(), min(k, x.numel()), sorted=False)
    return index[magnitude != 0].sort().values


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
