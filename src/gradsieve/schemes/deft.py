"""DEFT (arXiv 2307.03500): layers weighed by their norms, packed so that all ranks select equally long.

1. Cut the vector into layers, once: every tensor is one; one longer than n / P becomes P pieces.
2. Add up the layers' norms over all ranks.
3. Divide k among the layers in proportion to the norms, in whole numbers that add up to k.
4. Pack the layers into P bins, the largest cost first, each to the bin that would be done with it first. In
   step t rank r takes bin (t + r) mod P.
5. Select the largest elements of each layer in the own bin, as many as the layer's part of k.
6. Gather the selected indices; a layer that travels whole needs none.
7. All-reduce the values at those indices.

All ranks know the norms (in the paper each rank has its own), so all find the same division and the
same bins: no leader, no broadcast, and the count is k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve import torch_names
from gradsieve.comm.ops import AllGather, AllReduce
from gradsieve.kernels import largest
from gradsieve.schemes.base import Agreed, sum_agreed
from gradsieve.schemes.shares import check_speeds, evenly, phase, shares_of_work
from gradsieve.types import Ctx, Outcome, Program, Sparse
from gradsieve.wire.check import none_negative, rows_increasing, strictly_increasing
from gradsieve.wire.pairs import index_dtype


@dataclass(frozen=True, kw_only=True)
class State:
    # First element of every layer, and n.
    edges: Tensor
    sent: int = 0
    # Indices in the longest row of the last step.
    longest: int = 0
    # Indices in all of them.
    rows: int = 0
    # The longest row over the mean.
    imbalance: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Deft(Agreed[State]):
    # How fast each rank selects, if not all alike: bins are filled in proportion.
    speeds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_speeds(self.speeds)

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        return self.init_state([n], world)

    def init_state(self, sizes: Sequence[int], world: int, previous: State | None = None) -> State:
        # 1.
        return State(edges=make_layers(sizes, world))

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        n, sizes = acc.numel(), state.edges.diff()
        # 2.
        norms = yield AllReduce(norms_of(acc, sizes.tolist()))
        none_negative(norms, f"norms of layers in step {ctx.step}")
        # 3.
        counts = _apportion(norms.double().cpu(), sizes, self.k(n), ctx.step)
        whole = (counts == sizes) & (sizes > 0)
        # 4.
        work = shares_of_work(self.speeds, ctx.world)
        cost = sizes * counts.clamp(min=2).float().log2() * ((counts > 0) & ~whole)
        owner = pack(cost, work, ctx.step, even=self.speeds is None)
        picked_by = counts.new_zeros(ctx.world).index_add_(0, owner, counts * ~whole)
        # 5.
        mine = ((owner == ctx.rank) & (counts > 0) & ~whole).nonzero().flatten()
        selected = [
            largest(acc[start:stop], count) + start
            for start, stop, count in zip(
                state.edges[mine].tolist(), state.edges[mine + 1].tolist(), counts[mine].tolist(), strict=True
            )
        ]
        # 6. A layer with fewer non-zero elements than its count leaves its row filled up with n.
        longest = int(picked_by.max())
        row = torch.full((longest,), n, dtype=index_dtype(n), device=acc.device)
        if selected:
            found = torch.cat(selected)
            row[: found.numel()] = found
        rows = yield AllGather(row)
        rows_increasing(rows, n, f"indices in step {ctx.step}")
        gathered = rows[rows != n].long()
        picked = torch.cat([gathered, all_of(whole, state.edges).to(acc.device)]).sort().values
        strictly_increasing(picked, n, f"indices of all ranks in step {ctx.step}")
        # 7.
        total, given = yield from sum_agreed(acc[picked], self.values, ctx)
        imbalance = longest * ctx.world / int(picked_by.sum()) if longest else 1.0
        new = replace(state, sent=picked.numel(), longest=longest, rows=gathered.numel(), imbalance=imbalance)
        return Outcome(Sparse(picked, total, n), Sparse(picked, given, n), new)

    def report(self, state: State) -> Mapping[str, float]:
        return {"layers": state.edges.numel() - 1.0, "imbalance": state.imbalance}


def make_layers(sizes: Sequence[int], world: int) -> Tensor:
    """Returns the first element of every layer, and n."""
    n, layers = sum(sizes), [0]
    for size in sizes:
        layers += evenly(size, min(world, size)) if size * world > n else [size] * (size > 0)
    return torch.tensor(layers, dtype=torch.long, device="cpu").cumsum(0)


def norms_of(acc: Tensor, sizes: list[int]) -> Tensor:
    """Computes the norm of every layer; where squares overflow or underflow, the largest magnitude stands
    in."""
    layers = torch.split(acc, sizes) if sizes else ()
    norms = torch.stack(torch_names.norms_of(layers)) if layers else acc[:0].clone()
    for odd in (~((norms > 0) & norms.isfinite())).nonzero().flatten().tolist():
        norms[odd] = layers[odd].abs().max()
    return norms


def finite(norms: Tensor) -> Tensor:
    """Replaces what is not finite by numbers: whether a step counts is decided elsewhere."""
    return norms.nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max)


def _apportion(norms: Tensor, sizes: Tensor, k: int, step: int) -> Tensor:
    """Divides k in proportion to the norms, no layer beyond its size. Which layers get the fractions changes
    with the step, so that none is passed over for ever."""
    norms = finite(norms)
    order = (sizes / norms).argsort()
    size, norm = sizes[order].double(), norms[order]
    remaining = norm.flip(0).cumsum(0).flip(0)
    level = (k - (size.cumsum(0) - size)) / remaining
    full = ((level * norm >= size) & (norm > 0)).long().cumprod(0).bool()
    rest = int((full & (norm > 0)).sum())
    share = size.clone()
    if rest < share.numel():
        share[rest:] = norm[rest:] * level[rest].clamp(min=0.0).nan_to_num(nan=0.0, posinf=0.0)
    whole = share.floor()
    fractions = (share - whole).cumsum(0)
    fractions[-1:].round_()
    edges = (fractions + phase(step)).floor()
    counts = torch.empty_like(sizes)
    counts[order] = (whole + edges.diff(prepend=edges.new_zeros(1))).long()
    return counts


def pack(cost: Tensor, work: Tensor, step: int, even: bool) -> Tensor:
    """Returns the rank that selects in each layer."""
    world, layers = work.numel(), cost.numel()
    speed = work.roll(step % world).numpy()  # of the rank that takes each bin in this step
    load, bins = speed * 0.0, [0] * layers
    order = cost.argsort(descending=True, stable=True).tolist()
    if not even and layers:
        # Unequal bins would always give the largest layers to the fastest rank. One layer a step goes to
        # another rank, so that every rank's view of every layer counts some day.
        first, rank = step % layers, step // layers % world
        bins[first] = (rank + step) % world
        load[bins[first]] += float(cost[first])
        order.remove(first)
    amounts = cost.tolist()
    for layer in order:
        bins[layer] = int(((load + amounts[layer]) / speed).argmin())
        load[bins[layer]] += amounts[layer]
    return (torch.tensor(bins, dtype=torch.long, device="cpu") - step) % world


def all_of(whole: Tensor, edges: Tensor) -> Tensor:
    """Returns all indices of the layers marked."""
    starts, lengths = edges[:-1][whole], edges.diff()[whole]
    before = lengths.cumsum(0) - lengths
    place = torch.arange(int(lengths.sum()), dtype=torch.long, device=edges.device)
    return place + (starts - before).repeat_interleave(lengths)
