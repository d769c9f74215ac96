"""Ok-Topk's two kinds of balance: regions of equal load, and lists of equal length before they are gathered.

Lists of index and value, of known but different lengths, are gathered in rank order the cheaper of two ways:

    padded      all-gather of every list, filled up to the longest           longest (P-1) rows
    balanced    all-to-all of contiguous slices, so that every rank holds    moved + mean (P-1) rows
                the same number; then all-gather without gaps

All ranks know all lengths, so that all come to the same choice (`balancing_pays`; the paper has a rule of its
own). Rows are counted at the busiest rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather, AllToAll
from gradsieve.kernels import largest_of_each
from gradsieve.types import Program

# Elements for one region over k / P. Bounds what an owner receives, wherever ranks select.
_MOST = 1.1


def gather_lists(rows: Tensor, counts: Tensor, rank: int, balanced: bool) -> Program[Tensor]:
    """Gathers `counts[r]` rows of rank r, one list behind the other."""
    counts = counts.cpu()
    if balanced:
        held, shall = _edges(counts), _edges(_even(counts))
        sends = _overlaps(held[rank], held[rank + 1], shall)
        receives = _overlaps(shall[rank], shall[rank + 1], held)
        rows = yield AllToAll(rows, tuple(sends.tolist()), tuple(receives.tolist()))
        counts = _even(counts)
    longest = int(counts.max())
    message = rows.new_zeros((longest, *rows.shape[1:]))
    message[: rows.shape[0]] = rows
    gathered = yield AllGather(message)
    filled = torch.arange(longest, dtype=torch.long, device=counts.device) < counts[:, None]
    return gathered[filled.to(gathered.device)]


def balancing_pays(counts: Tensor) -> bool:
    held, shall, even = _edges(counts), _edges(_even(counts)), _even(counts)
    stays = (torch.minimum(held[1:], shall[1:]) - torch.maximum(held[:-1], shall[:-1])).clamp(min=0)
    moved = int((torch.maximum(counts, even) - stays).max())
    return moved + int(even.max()) * (counts.numel() - 1) < int(counts.max()) * (counts.numel() - 1)


def evened(cuts: Tensor, loads: Tensor) -> Tensor:
    """Returns regions that would have had equal loads, if every load lay evenly in its region.

    It does not, but a region that is cut is known better in the next step. (The mean of the ranks' quantiles
    is not: it falls next to the clusters that all of them select.)
    """
    world = loads.numel()
    before = torch.cat([loads.new_zeros(1), loads.cumsum(0)]).double()
    goals = torch.arange(1, world, dtype=torch.float64, device=loads.device) * before[-1] / world
    region = (torch.searchsorted(before, goals, right=True) - 1).clamp(0, world - 1)
    inside = (goals - before[region]) / loads[region].clamp(min=1)
    moved = cuts.clone()
    moved[1:-1] = (cuts[region] + inside * (cuts[region + 1] - cuts[region])).round().long()
    return moved


def thinned(acc: Tensor, selected: Tensor, cuts: Tensor, k: int) -> Tensor:
    """Keeps of the selected indices no more for one region than its owner can be sent by all: a little over k
    / P, the largest of them. The others stay in the residual until regions have followed."""
    world = cuts.numel() - 1
    region = torch.searchsorted(cuts[1:-1].to(selected.device), selected, right=True)
    share = math.ceil(_MOST * k / world)
    most = torch.full((world,), share, dtype=torch.long, device=selected.device)
    return selected[largest_of_each(acc[selected].abs(), region, most)]


def _even(counts: Tensor) -> Tensor:
    """Divides the same total into lists of one length, but for the last."""
    total, world = int(counts.sum()), counts.numel()
    place = torch.arange(world + 1, dtype=torch.long, device=counts.device)
    return (place * -(-total // world)).clamp(max=total).diff()


def _edges(counts: Tensor) -> Tensor:
    """Says where each list begins and ends when they stand one behind the other."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _overlaps(start: Tensor, stop: Tensor, edges: Tensor) -> Tensor:
    """Says how much of start..stop lies between each edge and the next."""
    return edges.clamp(start, stop).diff()
