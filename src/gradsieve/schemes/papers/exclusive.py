"""What ExDyna, MiCRO and DEFT share as published: three collectives, and a threshold rule (not DEFT).

    counts     all-gather of one integer a rank
    indices    all-gather of rows padded to the longest
    values     all-reduce of what every rank has at all of these indices

Every rank has spent what it has there: nothing is lost.

The releases write the lower edges 1/alpha and 1/beta as 0.95238 and 0.909.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather, AllReduce
from gradsieve.errors import ConfigError
from gradsieve.kernels import above
from gradsieve.schemes.base import Scheme
from gradsieve.types import Ctx, Host, Program, Sparse
from gradsieve.wire.check import counts_within, strictly_increasing
from gradsieve.wire.pairs import index_dtype


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """The state of one vector is the same on every rank."""

    n: int
    threshold: float
    # Elements selected in each partition in the last step.
    load: Tensor
    # Elements selected in the last step; -1 before the first.
    sent: int = -1


AnyTracked = TypeVar("AnyTracked", bound=Tracked)


@dataclass(frozen=True, kw_only=True)
class PublishedThreshold(Scheme[AnyTracked]):
    """Partitions are exclusive, and the threshold is scaled by fixed factors."""

    # The first threshold is this over sqrt(k).
    start: float = 0.5
    # Count over k, or k over count, from which on the threshold moves by gamma.
    beta: float = 1.1
    # Share by which the threshold rises or falls in a step.
    gamma: float = 0.005
    # Part of gamma by which it rises while the count is near k. (It never falls there: the branch that was
    # meant to lower it cannot be reached in the release. Kept, since it is what was measured.)
    inside: float = 0.25

    whole_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.start > 0 and self.beta >= 1 and 0 <= self.gamma < 1 and self.inside >= 0):
            raise ConfigError("start must be above 0, beta at least 1, gamma in 0..1, inside 0 or more")

    @abstractmethod
    def begin(self, n: int, world: int, previous: AnyTracked | None = None) -> AnyTracked: ...

    def first_threshold(self, n: int, previous: AnyTracked | None) -> float:
        return previous.threshold if previous else self.start / max(self.k(n), 1) ** 0.5

    def next_states(self, states: Sequence[AnyTracked]) -> list[AnyTracked]:
        """Sets the threshold of the next step by the count of the whole model."""
        ratio = sum(state.sent for state in states) / max(self.k(sum(state.n for state in states)), 1)
        if ratio > self.beta:
            factor = 1 + self.gamma
        elif ratio > 1 / self.beta:
            factor = 1 + self.inside * self.gamma
        else:
            factor = 1 - self.gamma
        return [replace(state, threshold=states[0].threshold * factor) for state in states]

    def report(self, state: AnyTracked) -> Mapping[str, float]:
        mean = max(state.sent, 1) / state.load.numel()
        return {"threshold": state.threshold, "imbalance": float(state.load.max()) / mean}


def edges_of(sizes: Sequence[int]) -> Tensor:
    """Says where parts of these sizes begin, and where the last one ends."""
    ends = torch.tensor([0, *sizes], dtype=torch.long, device="cpu")
    return ends.cumsum(0)


def exchange_partitions(
    acc: Tensor, cuts: Tensor, threshold: float, ctx: Ctx
) -> Program[tuple[Sparse, Sparse, Tensor]]:
    """Returns update, spent, and how many elements each partition had, after all ranks selected in theirs."""
    n, turn = acc.numel(), ctx.step % ctx.world
    selected = select_round_robin(acc, cuts, threshold, ctx)
    gathered, counts = yield from gather_padded(selected, by_owner(cuts.diff(), ctx.step), n, ctx)
    # From rank order into partition order: partition p was with rank (p - t) mod P.
    picked = gathered.roll(int(counts[ctx.world - turn :].sum()))
    update, spent = yield from sum_at(acc, picked, ctx)
    return update, spent, counts.roll(turn)


def select_round_robin(acc: Tensor, cuts: Tensor, threshold: float, ctx: Ctx) -> Tensor:
    """Selects what reaches the threshold in partition (t + r) mod P; where nothing does, one element, round
    robin."""
    part = (ctx.step + ctx.rank) % ctx.world
    start, stop = int(cuts[part]), int(cuts[part + 1])
    selected = above(acc[start:stop], threshold)
    if not selected.numel() and start < stop:
        selected = selected.new_tensor([ctx.step % (stop - start)])
    return selected + start


def gather_padded(selected: Tensor, most: Host, n: int, ctx: Ctx) -> Program[tuple[Tensor, Tensor]]:
    """Returns all ranks' indices, not checked yet, and how many each rank has; both in rank order. `most`
    says how many each rank can have."""
    counts = yield AllGather(torch.tensor([selected.numel()], dtype=torch.long, device=selected.device))
    counts = counts.flatten()
    counts_within(counts, most, f"elements in step {ctx.step}")
    row = torch.zeros(int(counts.max()), dtype=index_dtype(n), device=selected.device)
    row[: selected.numel()] = selected
    rows = yield AllGather(row)
    filled = torch.arange(row.numel(), dtype=torch.long, device=selected.device) < counts[:, None]
    return rows[filled].long(), counts.cpu()


def by_owner(sizes: Tensor, step: int) -> Host:
    """Puts sizes of partitions in the order of their owners: rank r has partition (t + r) mod P."""
    return sizes.roll(-step % sizes.numel()).numpy()


def sum_at(acc: Tensor, picked: Tensor, ctx: Ctx) -> Program[tuple[Sparse, Sparse]]:
    """Returns update and spent at the indices that all ranks received."""
    n = acc.numel()
    strictly_increasing(picked, n, f"indices gathered in step {ctx.step}")
    mine = acc[picked]
    total = yield AllReduce(mine.clone())
    return Sparse(picked, total, n), Sparse(picked, mine, n)
