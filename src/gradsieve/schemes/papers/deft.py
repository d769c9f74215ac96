"""DEFT with the rules of the paper and its release, to compare `deft.py` against.

1. Cut the model into layers, once: every tensor is one; one longer than n / P becomes P pieces.
2. Every rank divides k among the layers by the norms of its own vector, the largest norm first: in proportion
   to what is left of k and of the norms, at least one element, at most all.
3. The leader, rank t mod P, packs the layers into P bins by its own division, the largest cost first, each to
   the bin with the least so far. Layers that travel whole are in no bin.
4. It broadcasts the lengths of the bins, then the layers in them and, last, those that travel whole.
5. Rank r takes bin (t + r) mod P and selects the largest elements of each layer in it, as many as its own
   division says.
6. Gather the counts, then the indices padded to the largest count; add the layers that travel whole;
   all-reduce the values.

Divisions differ between ranks, so that the count is k only by and large.

Kept out is the crash of the release with one rank. Zeros are not selected where a layer has nothing else:
they carry no information.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradsieve.comm.ops import Broadcast
from gradsieve.errors import ConfigError
from gradsieve.kernels import largest
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.deft import State, all_of, finite, make_layers, norms_of, pack
from gradsieve.schemes.papers.exclusive import by_owner, edges_of, gather_padded, sum_at
from gradsieve.schemes.shares import shares_of_work
from gradsieve.types import Ctx, Outcome, Program
from gradsieve.wire.check import dealt_once


@dataclass(frozen=True, kw_only=True)
class DeftPaper(Scheme[State]):
    # Fewest elements of a layer.
    floor: int = 1

    whole_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor < 0:
            raise ConfigError(f"floor is a count: 0 or more, not {self.floor}")

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        return self.init_state([n], world)

    def init_state(self, sizes: Sequence[int], world: int, previous: State | None = None) -> State:
        # 1.
        return State(edges=make_layers(sizes, world))

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        n, sizes = acc.numel(), state.edges.diff()
        # 2.
        norms = finite(norms_of(acc, sizes.tolist()).double().cpu())
        counts = divided(norms.tolist(), sizes.tolist(), self.k(n), self.floor)
        # 3. and 4.
        bins, whole = yield from _sent_by_leader(sizes, sizes.new_tensor(counts), acc.device, ctx)
        # 5.
        selected = [acc.new_zeros(0, dtype=torch.long)]
        for layer in bins[(ctx.step + ctx.rank) % ctx.world].sort().values.tolist():
            start, stop = state.edges[layer : layer + 2].tolist()
            selected.append(largest(acc[start:stop], counts[layer]) + start)
        # 6.
        most = by_owner(torch.stack([sizes[layers].sum() for layers in bins]), ctx.step)
        gathered, found = yield from gather_padded(torch.cat(selected), most, n, ctx)
        common = torch.zeros_like(sizes, dtype=torch.bool)
        common[whole] = True
        picked = torch.cat([gathered, all_of(common, state.edges).to(acc.device)]).sort().values
        update, spent = yield from sum_at(acc, picked, ctx)
        new = replace(state, sent=update.count, longest=int(found.max()), rows=gathered.numel())
        return Outcome(update, spent, new)

    def report(self, state: State) -> Mapping[str, float]:
        return {"layers": state.edges.numel() - 1.0}


def divided(norms: Sequence[float], sizes: Sequence[int], k: int, floor: int) -> list[int]:
    """Divides k among the layers by one rank's norms."""
    counts = [0] * len(sizes)
    left, norm_left = k, sum(norms)
    for layer in sorted(range(len(sizes)), key=lambda layer: -norms[layer]):
        share = int(left * norms[layer] / norm_left) if norm_left > 0 else 0
        counts[layer] = min(sizes[layer], max(floor, share))
        left -= counts[layer]
        norm_left -= norms[layer]
    return counts


def _sent_by_leader(
    sizes: Tensor, counts: Tensor, device: torch.device, ctx: Ctx
) -> Program[tuple[Sequence[Tensor], Tensor]]:
    """Returns the leader's bins of layers, and the layers that travel whole."""
    world, layers, leader = ctx.world, sizes.numel(), ctx.step % ctx.world
    lengths, order = counts.new_zeros(world), counts.new_zeros(layers)
    if ctx.rank == leader:
        whole = counts == sizes
        cost = sizes * counts.clamp(min=2).double().log2() * ~whole
        bins = (pack(cost, shares_of_work(None, world), ctx.step, even=True) + ctx.step) % world
        bins[whole] = world
        lengths = bins.bincount(minlength=world + 1)[:world]
        order = bins.argsort(stable=True)
    lengths = (yield Broadcast(lengths.int().to(device), leader)).long().cpu()
    order = (yield Broadcast(order.int().to(device), leader)).long().cpu()
    dealt_once(order, lengths, f"layers in step {ctx.step} of the leader, rank {leader},")
    *bins_of, whole = order.tensor_split(edges_of(lengths.tolist())[1:].tolist())
    return bins_of, whole
