"""What schemes share in which every rank selects by itself: its entries go to everybody, counts first.

    counts    one integer a rank: how many elements it selected
    rows      all of the longest rank's length, filled up with index n, which is nowhere

Ranks pick the same index or not, as it happens. Either everybody's values are added up where they were sent
(`gather_entries`), or only indices are gathered and the values at their union are summed
(`reduce_union`): then every rank also gives, and spends, what it has where others picked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather
from gradsieve.kernels import above, largest, sum_by_index
from gradsieve.schemes.agreed import Values, sum_agreed
from gradsieve.schemes.base import Scheme, Seen
from gradsieve.types import Ctx, Program, Sparse
from gradsieve.wire.check import counts_within, rows_increasing
from gradsieve.wire.pairs import from_bits, index_dtype, to_bits


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


def pack_entries(mine: Tensor, values: Tensor, length: int, n: int) -> Tensor:
    """Writes indices and values into one message of shape (2, length), filled up with index n."""
    message = torch.full((2, length), n, dtype=index_dtype(n, values.dtype), device=values.device)
    message[0, : mine.numel()] = mine
    message[1, : mine.numel()] = to_bits(values)
    return message


def sum_entries(messages: Tensor, n: int, dtype: torch.dtype, ctx: Ctx) -> Sparse:
    """Adds all ranks' packed entries up for each index, in rank order.

    Virtual ranks are handed one and the same reply; the sum is kept with it, so that it is formed once for
    all of them and not P times (a thousand ranks would add up a thousand times ten million entries).
    """
    known: Sparse | None = getattr(messages, "_gradsieve_sum", None)
    if known is not None:
        return known
    rows = messages[:, 0]
    rows_increasing(rows, n, f"indices in step {ctx.step}")
    present = rows != n
    picked, total = sum_by_index(rows[present].long(), from_bits(messages[:, 1][present], dtype), n)
    update = Sparse(picked, total, n)
    messages._gradsieve_sum = update  # type: ignore[attr-defined]
    return update


def gather_entries(
    acc: Tensor, mine: Tensor, ctx: Ctx, most: int | None = None
) -> Program[tuple[Sparse, Sparse, Seen]]:
    """Returns update, spent and figures when every rank sends its `mine`, of at most so many, to
    everybody."""
    n, values = acc.numel(), acc[mine]
    counts = yield from _gather_counts(mine, n if most is None else most, n, ctx)
    messages = yield AllGather(pack_entries(mine, values, int(counts.max()), n))
    update = sum_entries(messages, n, acc.dtype, ctx)
    return update, Sparse(mine, values, n), _seen(counts, update.count)


def reduce_union(
    acc: Tensor, mine: Tensor, values: Values, ctx: Ctx, length: int | None = None
) -> Program[tuple[Sparse, Sparse, Seen]]:
    """Returns update, spent and figures when every rank gives what it has where any rank picked.

    `length` is that of the rows, where everybody knows it; else counts are gathered first.
    """
    n = acc.numel()
    if length is None:
        length = int((yield from _gather_counts(mine, n, n, ctx)).max())
    row = torch.full((length,), n, dtype=index_dtype(n), device=acc.device)
    row[: mine.numel()] = mine
    rows = yield AllGather(row)
    rows_increasing(rows, n, f"indices in step {ctx.step}")
    marks = torch.zeros(n + 1, dtype=torch.bool, device=acc.device)
    marks[rows.long()] = True  # no sorting: rows together can be many times n
    union = marks[:n].nonzero().flatten()
    total, given = yield from sum_agreed(acc[union], values, ctx)
    return Sparse(union, total, n), Sparse(union, given, n), _seen((rows != n).sum(1), union.numel())


def _gather_counts(mine: Tensor, most: int, n: int, ctx: Ctx) -> Program[Tensor]:
    counts = yield AllGather(torch.tensor([mine.numel()], dtype=index_dtype(n), device=mine.device))
    counts = counts.flatten()
    counts_within(counts, most, f"elements in step {ctx.step}")
    return counts


def _seen(counts: Tensor, union: int) -> Seen:
    return Seen(longest=int(counts.max()), mean=int(counts.sum()) / counts.numel(), union=union)
