"""What the baselines share in which every rank selects by an estimate: entries go to all ranks, counts first.

counts    one integer a rank: how many elements it selected
rows      all of the longest rank's length, filled up with index n, which is nowhere
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather
from gradsieve.kernels import above, largest
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.baselines.topk import pack_entries, sum_entries
from gradsieve.schemes.baselines.topk_union import Seen
from gradsieve.types import Ctx, Program, Sparse
from gradsieve.wire.check import counts_within
from gradsieve.wire.pairs import index_dtype


class Figures(Protocol):
    """Every State of such a scheme has these figures of the last step."""

    @property
    def longest(self) -> int: ...
    @property
    def imbalance(self) -> float: ...


AnyFigures = TypeVar("AnyFigures", bound=Figures)


@dataclass(frozen=True, kw_only=True)
class Gathering(Scheme[AnyFigures]):
    """A gathering scheme moves its entries by `gather_entries`."""

    def report(self, state: AnyFigures) -> Mapping[str, float]:
        return {"imbalance": state.imbalance}


def reaching(acc: Tensor, threshold: float) -> Tensor:
    """Selects by an estimate, which may be zero or less: that means all elements but zeros and denormals."""
    return above(acc, max(threshold, torch.finfo(acc.dtype).tiny))


def at_least_one(acc: Tensor, mine: Tensor) -> Tensor:
    """Returns the largest element where an estimate found none: whatever it says, residuals drain."""
    return mine if mine.numel() else largest(acc, 1)


def gather_entries(
    acc: Tensor, mine: Tensor, ctx: Ctx, most: int | None = None
) -> Program[tuple[Sparse, Sparse, Seen]]:
    """Returns update, spent and figures when every rank sends its `mine`, at most `most` elements, to all."""
    n, values = acc.numel(), acc[mine]
    counts = yield from gather_counts(mine, n if most is None else most, n, ctx)
    longest = int(counts.max())
    messages = yield AllGather(pack_entries(mine, values, longest, n))
    update = sum_entries(messages, n, acc.dtype, ctx)
    seen = Seen(longest=longest, mean=int(counts.sum()) / counts.numel(), union=update.count)
    return update, Sparse(mine, values, n), seen


def gather_counts(mine: Tensor, most: int, n: int, ctx: Ctx) -> Program[Tensor]:
    counts = yield AllGather(torch.tensor([mine.numel()], dtype=index_dtype(n), device=mine.device))
    counts = counts.flatten()
    counts_within(counts, most, f"elements in step {ctx.step}")
    return counts
