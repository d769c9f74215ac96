"""A peer's indices are checked here before anything is scattered with them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradsieve.errors import Malformed
from gradsieve.types import Host, to_host


def counts_within(counts: Tensor | Host, limit: int | Host, what: str) -> None:
    """Checks that every rank's count is in 0..limit; ranks may have limits of their own. Memory for a peer's
    next message is allocated by its count: the limit is what that rank can have."""
    seen = to_host(counts) if isinstance(counts, Tensor) else counts
    bad = (seen < 0) | (seen > limit)
    if bad.any():
        rank = int(bad.argmax())
        most = np.broadcast_to(limit, seen.shape)[rank]
        raise Malformed(f"rank {rank} announced {seen[rank]} {what}; between 0 and {most} are possible")


def stamped(found: Tensor, meant: Tensor, what: str) -> None:
    """Checks that every rank's message is the expected one."""
    bad = found != meant.to(found.dtype)
    if bool(bad.any()):
        rank = int(bad.to(torch.uint8).argmax())
        raise Malformed(
            f"rank {rank} announced {what} in a stale or misrouted message: it is of another step, or for "
            "another rank"
        )


def statistics_within(statistics: NDArray[np.float32], what: str) -> None:
    """Checks that every rank's statistic is a finite number from 0 up."""
    bad = ~np.isfinite(statistics) | (statistics < 0)
    if bad.any():
        rank = int(bad.argmax())
        raise Malformed(f"rank {rank} sent a threshold statistic of {statistics[rank]} {what}")


def none_negative(sums: Tensor, what: str) -> None:
    """Checks that no sum is below 0. Sums that are not finite pass: the exchange is then skipped."""
    if bool((sums < 0).any()):
        raise Malformed(f"{what} add up to {float(sums.min())} over all ranks: some rank sent one below 0")


def inside_its_partition(places: Host, spans: Host, ranks: Host, what: str) -> None:
    """Checks that every index, relative to its partition, lies in it; `spans` and `ranks` say whose it is."""
    bad = places >= spans
    if bad.any():
        first = int(bad.argmax())
        raise Malformed(
            f"rank {ranks[first]} sent index {places[first]} {what} of a partition that has {spans[first]}"
        )


def rows_increasing(rows: Tensor, n: int, what: str) -> None:
    """Checks that each rank's row of indices is sorted, unique and inside 0..n-1, then filled up with n."""
    fine = _in_order(rows, n)
    if not bool(fine.all()):
        rank = int(fine.int().argmin())
        raise Malformed(f"{what} of rank {rank} are not sorted, unique and inside 0..{n - 1}")


def row_increasing(row: Tensor, n: int, what: str) -> None:
    """Checks that one row of indices is sorted, unique and inside 0..n-1, then filled up with n."""
    if not bool(_in_order(row[None], n)):
        raise Malformed(f"{what} are not sorted, unique and inside 0..{n - 1}")


def strictly_increasing(indices: Tensor, n: int, what: str) -> None:
    """Checks that indices are sorted, unique and inside 0..n-1: safe to scatter with on any device."""
    if not indices.numel():
        return
    first, last = int(indices[0]), int(indices[-1])
    if first < 0 or last >= n or not bool((indices[1:] > indices[:-1]).all()):
        raise Malformed(f"{what} are not sorted, unique and inside 0..{n - 1} (first {first}, last {last})")


def lists_increasing(indices: Tensor, counts: Tensor, start: int, stop: int, what: str) -> None:
    """Checks that lists one behind the other, `counts` long, are sorted, unique and inside start..stop-1."""
    ranks = torch.arange(counts.numel(), dtype=torch.int64, device=counts.device)
    sender = ranks.repeat_interleave(counts)
    fine = (indices >= start) & (indices < stop)
    fine[1:] &= (indices[1:] > indices[:-1]) | (sender[1:] > sender[:-1])
    if not bool(fine.all()):
        rank = int(sender[fine.int().argmin()])
        raise Malformed(f"{what} of rank {rank} are not sorted, unique and inside {start}..{stop - 1}")


def dealt_once(items: Tensor, lengths: Tensor, what: str) -> None:
    """Checks that the items are 0..n-1, each once, and enough for lots of these lengths."""
    expected = torch.arange(items.numel(), dtype=items.dtype, device=items.device)
    lots = bool((lengths >= 0).all()) and int(lengths.sum()) <= items.numel()
    if not lots or not torch.equal(items.sort().values, expected):
        raise Malformed(f"{what} are not each of 0..{items.numel() - 1} once, in lots of {lengths.tolist()}")


def _in_order(rows: Tensor, n: int) -> Tensor:
    """Says for each row whether it increases inside 0..n-1 and is then filled up with n."""
    before, after = rows[:, :-1], rows[:, 1:]
    rising = (after > before) | ((after == n) & (before == n))
    return rising.all(1) & ((rows >= 0) & (rows <= n)).all(1)
