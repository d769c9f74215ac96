"""What Ok-Topk's rules, ours and the published ones, share: regions, who adds up what, and lists of sums.

Lists of index and value, of known but different lengths, are gathered in rank order the cheaper of two ways:

    padded      all-gather of every list, filled up to the longest           longest (P-1) rows
    balanced    all-to-all of contiguous slices, so that every rank holds    moved + mean (P-1) rows
                the same number; then all-gather without gaps

All ranks know all lengths, so that all come to the same choice (`balancing_pays`; the paper has a rule of its
own). Rows are counted at the busiest rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.comm import rounds
from gradsieve.comm.ops import AllGather, AllReduce, AllToAll
from gradsieve.errors import ConfigError
from gradsieve.kernels import largest_of_each, sum_by_index
from gradsieve.schemes.base import Scheme
from gradsieve.types import Ctx, Program, private
from gradsieve.wire.check import counts_within, lists_increasing, stamped, strictly_increasing
from gradsieve.wire.pairs import from_pairs, index_dtype, to_pairs

# As many as four bytes hold.
_STAMPS = 2**31
# Elements for one region over k / P. Bounds what an owner receives, wherever ranks select.
_MOST = 1.1


@dataclass(frozen=True, kw_only=True)
class State:
    n: int
    # P + 1 edges of the regions; all 0: not set yet.
    cuts: Tensor
    # For sums, of this vector alone. 0: none known.
    global_threshold: float = 0.0
    # For this rank's own elements. 0: none known.
    local_threshold: float = private(0.0)
    # Sums gathered in the last step.
    gathered: int = 0
    # 1 if these were all sums there are, for an exact threshold.
    exact: int = 0
    # Most elements that came to one owner over the mean.
    imbalance: float = 1.0


class Sums(NamedTuple):
    indices: Tensor
    values: Tensor
    # Elements that were added up.
    load: int


class Chosen(NamedTuple):
    """The chosen sums are the same on every rank."""

    indices: Tensor
    values: Tensor
    gathered: int
    # For the next step.
    threshold: float
    # Elements that came to each owner.
    loads: Tensor


@dataclass(frozen=True, kw_only=True)
class Regional(Scheme[State]):
    # Steps between exact local thresholds; the paper's tau', as the next one.
    local_period: int = 32
    # Steps between exact global thresholds.
    global_period: int = 32
    # Steps between new regions; the paper's tau.
    region_period: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("local_period", "global_period", "region_period"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1 step, not {getattr(self, name)}")

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        """Thresholds belong to one vector and are not kept: the first step evaluates them."""
        return State(n=n, cuts=torch.zeros(world + 1, dtype=torch.long, device="cpu"))

    def report(self, state: State) -> Mapping[str, float]:
        exact = float(state.exact)
        return {"threshold": state.global_threshold, "imbalance": state.imbalance, "exact": exact}


def make_regions(wanted: Tensor, n: int) -> Program[Tensor]:
    """Turns the P - 1 cuts that each rank would like into P + 1 edges that are the same on every rank."""
    world = wanted.numel() + 1
    total = yield AllReduce(wanted)
    cuts = torch.zeros(world + 1, dtype=torch.long, device="cpu")
    # A mean of sorted lists is sorted; only a peer that lies could make it otherwise.
    cuts[1:-1] = (total // world).clamp(0, n).sort().values
    cuts[-1] = n
    return cuts


def split_and_reduce(acc: Tensor, selected: Tensor, cuts: Tensor, most: int, ctx: Ctx) -> Program[Sums]:
    """Adds up what all ranks selected in this rank's region, at most `most` each, in rank order.

    The engine sees to it that no rank is the target of all at once, and that few messages are pending
    together.
    """
    n, start, stop = acc.numel(), int(cuts[ctx.rank]), int(cuts[ctx.rank + 1])
    what = f"in step {ctx.step}"
    counts = torch.searchsorted(selected, cuts.to(acc.device)).diff()
    sizes = yield from _announced(counts, index_dtype(n), ctx, f"elements {what}")
    counts_within(sizes, min(most, stop - start), f"elements {what}")
    rows = to_pairs(selected, acc[selected], n)
    rows = yield AllToAll(rows, tuple(counts.tolist()), tuple(sizes.tolist()))
    indices, values = from_pairs(rows, acc.dtype)
    lists_increasing(indices, sizes, start, stop, f"indices {what}")
    indices, sums = sum_by_index(indices - start, values, stop - start)
    return Sums(indices + start, sums, len(rows))


def _announced(counts: Tensor, dtype: torch.dtype, ctx: Ctx, what: str) -> Program[Tensor]:
    """Returns how many elements every rank has for this one, given how many this one has for each.

    Counts are stamped with step, sender and owner: a message that came again would announce another length
    than is sent, and an engine that receives more than it expects may end the process.
    """
    ranks = torch.arange(ctx.world, dtype=torch.int64, device=counts.device)
    to_all = ((ctx.step * ctx.world + ctx.rank) * ctx.world + ranks) % _STAMPS
    to_me = ((ctx.step * ctx.world + ranks) * ctx.world + ctx.rank) % _STAMPS
    rows = yield from rounds.transpose(torch.stack([counts, to_all], 1).to(dtype), ctx.rank)
    stamped(rows[:, 1], to_me, what)
    return rows[:, 0].contiguous()


def among(sorted_some: Tensor, sorted_all: Tensor) -> Tensor:
    """Says which of `sorted_some` are in `sorted_all`."""
    if not sorted_all.numel():
        return torch.zeros_like(sorted_some, dtype=torch.bool)
    place = torch.searchsorted(sorted_all, sorted_some).clamp(max=sorted_all.numel() - 1)
    return sorted_all[place] == sorted_some


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


def announce(
    sums: Sums, offered: Tensor, cuts: Tensor, most: int, ctx: Ctx
) -> Program[tuple[Tensor, Tensor]]:
    """Returns how many sums each owner offers, and how many elements, `most` at most, came to it."""
    mine = sums.values.new_tensor([offered.numel(), sums.load], dtype=index_dtype(most))
    sizes = yield AllGather(mine)
    counts, loads = sizes.cpu().long().unbind(1)
    counts_within(counts, cuts.diff().clamp(max=most).numpy(), f"sums in step {ctx.step}")
    counts_within(loads, most, f"elements received in step {ctx.step}")
    return counts, loads


def gather_sums(
    sums: Sums, offered: Tensor, counts: Tensor, n: int, balanced: bool, ctx: Ctx
) -> Program[tuple[Tensor, Tensor]]:
    """Returns indices and values of the sums that all owners offer, `counts[r]` of them rank r's."""
    rows = to_pairs(sums.indices[offered], sums.values[offered], n)
    rows = yield from gather_lists(rows, counts, ctx.rank, balanced)
    indices, values = from_pairs(rows, sums.values.dtype)
    strictly_increasing(indices, n, f"indices gathered in step {ctx.step}")
    return indices, values


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
