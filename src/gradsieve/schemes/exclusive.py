"""What MiCRO and ExDyna share: exclusive partitions, one threshold, two collectives.

Every element belongs to one partition, every partition to one rank for this step. The owner alone decides
which of its elements travel, so no two ranks pick the same index and nothing builds up.

The message of a rank is one row of bytes, its length known to all before it is sent:

    [ demand | statistic | indices, packed (`wire/indices.py`) ]

`demand` is how many elements were above the threshold, also those that did not fit (they are not spent and
stay in the residual). `statistic` is one float that says where the threshold should go. Which one it is
follows from the threshold, which all ranks share:

    log excess     with a threshold: the sum of ln(|x| / threshold) over the demand. Divided by the demand it
                   is Hill's estimate of 1/a for a tail that falls as x^-a, so count -> k needs
                   threshold *= (count / k)^(1/a).
    smallest sum   without one: each owner sends its exact largest elements, as many as its quota, and
                   count * smallest of them; the threshold becomes the mean of the smallest.

Both sums are linear, so that they add up over ranks and over buckets to one threshold for the whole model.

What a rank selects is decided on the device of its vector, without a look from the host; the rows of all
ranks come to the host in one copy, and all that follows from them (checks, balance, threshold) is numpy
there. So an exchange waits for the device once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradsieve.comm import rounds
from gradsieve.comm.ops import AllGather
from gradsieve.kernels import largest, select
from gradsieve.kernels.torch_passes import sendable
from gradsieve.schemes.base import Agreed, Values, sum_agreed
from gradsieve.schemes.shares import Owners, phase
from gradsieve.schemes.threshold import FACTORS, AnyPartitioned, move_threshold
from gradsieve.types import Ctx, Host, Program, Sparse, Vector, to_host
from gradsieve.wire import indices
from gradsieve.wire.check import counts_within, inside_its_partition, statistics_within

# Bytes of demand (int64) and statistic (float32).
HEADER = 12


@dataclass(frozen=True, kw_only=True)
class Exclusive(Agreed[AnyPartitioned]):
    """Exclusive partitions have one threshold for the model, and cost about three words an element."""

    # False, for ablation: the threshold stays as it was found, until it selects nothing.
    control: bool = True

    reads_parts: ClassVar[bool] = True

    def owners(self, world: int, state: AnyPartitioned) -> int:
        """Returns how many ranks own a partition, and send a row."""
        return world

    def next_states(self, states: Sequence[AnyPartitioned]) -> list[AnyPartitioned]:
        return move_threshold(states, self.k(sum(state.n for state in states)), self.control)

    def report(self, state: AnyPartitioned) -> Mapping[str, float]:
        return {
            "threshold": state.threshold,
            "imbalance": state.imbalance,
            "demand": state.demand,
            "cut": state.cut,
        }


@dataclass(frozen=True, slots=True)
class Gathered:
    """This is known to every rank after the gather of indices, in partition order, on the host."""

    # All indices, sorted.
    picked: Host
    # Indices from each partition.
    sent: Host
    # Elements above the threshold in each partition.
    demand: Host
    # Indices that a row can hold.
    capacity: int
    # Log excess or smallest sum of each partition.
    statistic: NDArray[np.float64]


def gather_selected(
    acc: Tensor | Vector, cuts: Host, quotas: Host, capacity: int, threshold: float, ctx: Ctx
) -> Program[Gathered]:
    """Selects in this rank's partition, gathers the rows of all owners and puts them in partition order."""
    span = max(1, int(np.diff(cuts).max()))
    capacity = min(capacity, span)
    codec, owners = indices.choose(capacity, span), Owners(ctx.world, len(cuts) - 1, ctx.step)
    part = owners.part_of(ctx.rank)
    start, stop, most = (0, 0, 0) if part is None else (*map(int, cuts[part : part + 2]), int(quotas[part]))
    selected, demand, statistic = (
        _select_above(acc, start, stop, threshold, capacity, ctx.step)
        if threshold
        else _select_largest(acc, start, stop, min(most, capacity), capacity)
    )
    kept = demand.clamp(max=capacity)
    header = [demand[None].view(torch.uint8), statistic[None].view(torch.uint8)]
    row = torch.cat([*header, codec.encode(selected, kept, capacity, span)])
    rows = yield from _gather_rows(row, owners, ctx.rank)
    return read_rows(to_host(rows), codec, cuts, capacity, owners)


def _gather_rows(row: Tensor, owners: Owners, rank: int) -> Program[Tensor]:
    """Gathers the rows of the owners in rank order."""
    if owners.partitions == owners.world:
        return (yield AllGather(row))
    lengths = np.zeros(owners.world, dtype=np.int64)
    lengths[owners.ranks()] = row.numel()
    own = row if lengths[rank] else row[:0]
    every = yield from rounds.gather(own, rank, range(owners.world), lengths)
    return every.view(owners.partitions, -1)


def read_rows(
    rows: NDArray[np.uint8], codec: indices.IndexCodec, cuts: Host, capacity: int, owners: Owners
) -> Gathered:
    """Reads and checks the rows of all owners, and puts them in partition order."""
    spans, turn, step = np.diff(cuts), owners.first, owners.step
    parts, ranks = len(spans), owners.ranks()
    span = max(1, int(spans.max()))
    demands = rows[:, :8].copy().view(np.int64).flatten()
    statistics = rows[:, 8:HEADER].copy().view(np.float32).flatten()
    limits = _by_rank(_turned(spans, parts - turn), ranks, owners)
    counts_within(_by_rank(demands, ranks, owners), limits, f"elements in step {step}")
    statistics_within(_by_rank(statistics, ranks, owners), f"in step {step}")
    sent = demands.clip(max=capacity)
    places = codec.decode(rows[:, HEADER:], sent, capacity, span)
    row = np.repeat(np.arange(parts), sent)
    owned = (row + turn) % parts  # the partition of each index
    inside_its_partition(places, spans[owned], ranks[row], f"in step {step}")
    picked = _turned(places + cuts[owned], int(sent[parts - turn :].sum()))
    sent, demands, statistics = _turned(sent, turn), _turned(demands, turn), _turned(statistics, turn)
    return Gathered(picked, sent, demands, capacity, statistics.astype(np.float64))


def _by_rank(of_owners: NDArray[Any], ranks: Host, owners: Owners) -> NDArray[Any]:
    """Puts 0 where a rank owns nothing: checks name a rank by its place."""
    every = np.zeros(owners.world, of_owners.dtype)
    every[ranks] = of_owners
    return every


def _turned(row: NDArray[Any], by: int) -> NDArray[Any]:
    """Puts the last `by` of a row before its first: `np.roll` of short rows, in a fraction of its time."""
    cut = len(row) - by
    return np.concatenate((row[cut:], row[:cut]))


def _select_above(
    acc: Tensor | Vector, start: int, stop: int, threshold: float, capacity: int, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns as many indices of the partition as fit, then filler; how many reach the threshold; their log
    excess."""
    if isinstance(acc, Tensor):
        return select(acc[start:stop], threshold, capacity, phase(step))
    return acc.select(start, stop, threshold, capacity, phase(step))


def _select_largest(
    acc: Tensor | Vector, start: int, stop: int, count: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the indices of the largest elements of the partition, then filler; how many these are; their
    smallest sum."""
    x = acc[start:stop] if isinstance(acc, Tensor) else acc.between(start, stop)
    chosen = largest(x, count)
    smallest = x[chosen].abs().min() if chosen.numel() else x.new_zeros(())
    filled = torch.nn.functional.pad(chosen, (0, capacity - chosen.numel()))
    demand = torch.tensor(chosen.numel(), dtype=torch.int64, device=x.device)
    return filled, demand, sendable(chosen.numel() * smallest)


def sum_values(
    acc: Tensor | Vector, gathered: Gathered, values: Values, ctx: Ctx
) -> Program[tuple[Sparse, Sparse]]:
    """Returns the sum over ranks at the gathered indices, and what this rank gave to it."""
    n, host = acc.numel(), gathered.picked
    picked = torch.from_numpy(host).to(acc.device, non_blocking=True)
    mine = acc[picked] if isinstance(acc, Tensor) else acc.at(host, picked)
    total, given = yield from sum_agreed(mine, values, ctx)
    return Sparse(picked, total, n, host), Sparse(picked, given, n, host)


def absorb(state: AnyPartitioned, gathered: Gathered) -> AnyPartitioned:
    """Puts the bucket's figures of this step into its state, for the threshold of the next one."""
    demand = float(gathered.demand.sum())
    return replace(
        state,
        demand=demand,
        tail=float(gathered.statistic.sum()),
        curve=torch.from_numpy(np.minimum(np.outer(FACTORS, gathered.demand), gathered.capacity).sum(1)),
        sent=int(gathered.sent.sum()),
        longest=int(gathered.sent.max()),
        imbalance=float(gathered.demand.max()) * gathered.demand.size / demand if demand else 1.0,
        cut=float((gathered.demand > gathered.sent).mean()),
    )
