"""Torch's form of the kernels, on the tensors' own device, in few passes over memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Elements whose magnitudes and marks stay in a CPU core's cache between the passes over them.
_CHUNK = 1 << 17
# Elements of which only the largest is compared first: at low density that is enough for most rows.
_ROW = 64
# Elements among the largest that a sample should contain.
_SAMPLED = 50
# Elements of a long block for one that is sampled, at least.
_FEWEST = 16


def is_finite(x: Tensor) -> bool:
    """Sums in one pass: a sum with a NaN or infinity is not finite. Finite elements may overflow, so that a
    bad sum is checked again element by element."""
    return math.isfinite(x.sum().item()) or bool(x.isfinite().all())


def finite(tensors: Sequence[Tensor]) -> Tensor:
    """Checks many tensors on an accelerator, in as many launches as few; the host does not wait."""
    there = [x for x in tensors if x.numel()]
    return torch.nn.utils.get_total_norm(there, math.inf) < math.inf


def above(x: Tensor, threshold: float) -> Tensor:
    if not x.is_cpu or x.numel() < _CHUNK:
        return (x.abs() >= threshold).nonzero().flatten()
    magnitude = x.new_empty(_CHUNK)
    found = [
        _places_above(torch.abs(x[here], out=magnitude[: here.stop - here.start]), threshold).add_(here.start)
        for here in _pieces(x)
    ]
    return torch.cat(found)


def _places_above(magnitude: Tensor, threshold: float) -> Tensor:
    """Returns sorted places with magnitude >= threshold, found in the rows that can contain one."""
    body = magnitude.numel() - magnitude.numel() % _ROW
    rows = magnitude[:body].view(-1, _ROW)
    hot = (rows.amax(1) < threshold).logical_not_().nonzero().flatten()  # also where a NaN hides the largest
    inside = (rows[hot] >= threshold).flatten().nonzero().flatten()
    found = hot[inside // _ROW].mul_(_ROW).add_(inside % _ROW)
    if body == magnitude.numel():
        return found
    return torch.cat([found, (magnitude[body:] >= threshold).nonzero().flatten().add_(body)])


def largest(x: Tensor, k: int) -> Tensor:
    """Returns sorted indices of the k largest |x|, fewer if fewer elements are neither zero nor NaN.

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
    """Returns sorted indices of what can be among the `count` largest |x| of each block of `length` elements:
    all above a threshold that a sample of the block suggests, about twice as many."""
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
    """Does `above` for every row with its own threshold; indices are into the concatenated rows."""
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
    """Returns sorted places of the counts[b] largest magnitudes of every block b; `block` does not decrease.
    Between equal magnitudes the earlier place is taken."""
    order = magnitude.sort(descending=True, stable=True).indices
    order = order[block[order].sort(stable=True).indices]
    lengths = torch.bincount(block, minlength=counts.numel())
    place = torch.arange(block.numel(), dtype=torch.int64, device=block.device)
    rank = place - (lengths.cumsum(0) - lengths)[block]
    return order[rank < counts[block]].sort().values


def sum_by_index(indices: Tensor, values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Returns sorted unique indices and, for each, its values added up in the order given.

    Sorting serves every device and is the same on each rank (`index_add_` on a GPU is not). On a CPU, with
    more entries than is worth sorting, adding into a dense vector is sequential too, and faster.
    """
    if indices.device.type == "cpu" and indices.numel() > n // 16:
        total = torch.zeros(n, dtype=values.dtype, device=values.device).index_add_(0, indices, values)
        marks = torch.zeros(n, dtype=torch.bool, device=values.device)
        marks[indices] = True
        present = marks.nonzero().flatten()
        return present, total[present]
    if not indices.numel():
        return indices, values
    ordered, order = indices.sort(stable=True)
    present, lengths = torch.unique_consecutive(ordered, return_counts=True)
    return present, torch.segment_reduce(values[order], "sum", lengths=lengths, initial=0)


def accumulate(residual: Tensor, gradient: Tensor, scale: float, out: Tensor) -> bool:
    sums = []
    for here in _pieces(out):
        if scale == 1.0:
            torch.add(gradient[here], residual[here], out=out[here])
        else:
            torch.mul(residual[here], scale, out=out[here]).add_(gradient[here])
        sums.append(out[here].sum())
    return is_finite(torch.stack(sums)) or is_finite(out)


def residual(anchor: Tensor, own: Tensor, out: Tensor) -> None:
    own = own.detach()
    for here in _pieces(anchor):
        _wait(anchor[here], own[here], out[here])


def residual_above(anchor: Tensor, own: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    own = own.detach()
    indices, values, magnitude = [], [], _buffer(anchor)
    for here, waits in _pieces_with_buffer(anchor):
        _wait(anchor[here], own[here], waits)
        found = _places_above(torch.abs(waits, out=magnitude[: waits.numel()]), threshold)
        values.append(waits[found])
        indices.append(found.add_(here.start))
    return torch.cat(indices), torch.cat(values)


def rebase(shared: Tensor, own: Tensor, anchor: Tensor, preview: float) -> None:
    own = own.detach()
    for here, waits in _pieces_with_buffer(shared):
        x, m = own[here], anchor[here]
        _wait(m, x, waits)
        if x.dtype == m.dtype:
            torch.mul(waits, -preview, out=x).add_(shared[here])
        else:  # rounded once, at the end
            x.copy_(torch.mul(waits, -preview, out=m).add_(shared[here]))
        torch.add(waits, x, out=m)


def apply(shared: Tensor, own: Tensor, anchor: Tensor, update: Tensor, spent: Tensor, world: int) -> None:
    own = own.detach()  # two roundings, not a fused one: replicas on all processors must keep the same bits
    ranks = divisor(world, update)
    for here in _pieces(shared):
        x = own[here].to(anchor.dtype)
        left = (anchor[here] - x).sub_(spent[here])
        torch.add(x, left.nan_to_num_(0.0, 0.0, 0.0), out=anchor[here])
        shared[here] -= update[here] / ranks


def divisor(number: float, of: Tensor) -> Tensor:
    """Returns a tensor to divide by: CUDA would multiply with a number's inverse, which rounds otherwise."""
    return torch.full((), number, dtype=of.dtype, device=of.device)


def select_without_waiting(
    x: Tensor, threshold: float, capacity: int, phase: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Selects on an accelerator: no shape depends on the data and the host waits for nothing."""
    magnitude = x.abs()
    marks = magnitude >= threshold
    tail = torch.where(marks, (magnitude / threshold).log(), 0.0).sum()
    seen = marks.cumsum(0)
    demand = seen[-1:].sum()
    ranks = torch.arange(1, capacity + 1, dtype=torch.int64, device=x.device)
    begin = (phase * (demand - capacity).clamp(min=0).double()).floor().long()
    return torch.searchsorted(seen, begin + ranks), demand, sendable(tail)


def window(
    found: Tensor, values: Tensor, n: int, threshold: float, capacity: int, phase: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Does `select` for n elements, given all indices above the threshold and the values there."""
    tail = (values.abs() / threshold).log().sum()
    begin = math.floor(phase * max(found.numel() - capacity, 0))
    taken = found[begin : begin + capacity]
    filling = taken.new_full((capacity - taken.numel(),), n)
    demand = torch.tensor(found.numel(), dtype=torch.int64, device=found.device)
    return torch.cat([taken, filling]), demand, sendable(tail)


def sendable(tail: Tensor) -> Tensor:
    """Turns a statistic into a finite float32, whatever strange values were in the gradient."""
    largest_float = torch.finfo(torch.float32).max
    return tail.nan_to_num(nan=largest_float).clamp(0.0, largest_float).float()


def _wait(anchor: Tensor, own: Tensor, out: Tensor) -> None:
    torch.sub(anchor, own, out=out)
    if not (out.is_cpu and math.isfinite(out.sum().item())):  # a sum of finite ones may overflow: no matter
        out.nan_to_num_(0.0, 0.0, 0.0)


def _pieces(x: Tensor) -> Iterator[slice]:
    """Returns all of x, on a CPU in pieces that fit a core's cache; of an empty x, one empty piece."""
    step = _CHUNK if x.is_cpu else max(x.numel(), 1)
    return (slice(begin, min(begin + step, x.numel())) for begin in range(0, max(x.numel(), 1), step))


def _pieces_with_buffer(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Returns each piece and one buffer to compute all in: new memory would push some out of the cache."""
    buffer = _buffer(x)
    return ((here, buffer[: here.stop - here.start]) for here in _pieces(x))


def _buffer(x: Tensor) -> Tensor:
    """Makes memory as long as the longest piece of x."""
    return x.new_empty(min(x.numel(), _CHUNK) if x.is_cpu else x.numel())
