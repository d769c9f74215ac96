"""What Ok-Topk's rules, ours and the published ones, share: regions, and who adds up what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.comm import rounds
from gradsieve.comm.ops import AllReduce, AllToAll
from gradsieve.errors import ConfigError
from gradsieve.kernels import sum_by_index
from gradsieve.schemes.base import Scheme
from gradsieve.types import Ctx, Program, private
from gradsieve.wire.check import counts_within, lists_increasing, stamped
from gradsieve.wire.pairs import from_pairs, index_dtype, to_pairs

# As many as four bytes hold.
_STAMPS = 2**31


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

    The engine sees to it that nobody is everybody's target at once, and that few messages are pending
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
