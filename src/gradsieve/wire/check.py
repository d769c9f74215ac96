"""The only door for a peer's indices: nothing is scattered before it went through here."""

from __future__ import annotations

from torch import Tensor

from gradsieve.errors import Malformed


def counts_within(counts: Tensor, limit: int, what: str) -> None:
    """Every rank's count is in 0..limit."""
    bad = ((counts < 0) | (counts > limit)).nonzero().flatten()
    if bad.numel():
        rank = int(bad[0])
        raise Malformed(
            f"rank {rank} announced {int(counts[rank])} {what}; between 0 and {limit} are possible"
        )


def tails_within(tails: Tensor, what: str) -> None:
    """Every rank's tail sum is a finite number from 0 up."""
    bad = (~tails.isfinite() | (tails < 0)).nonzero().flatten()
    if bad.numel():
        rank = int(bad[0])
        raise Malformed(f"rank {rank} sent a tail sum of {float(tails[rank])} {what}")


def rows_increasing(rows: Tensor, n: int, what: str) -> None:
    """Each rank's row of indices is sorted, unique and inside 0..n-1, then filled up with n."""
    before, after = rows[:, :-1], rows[:, 1:]
    fine = ((after > before) | ((after == n) & (before == n))).all(1) & ((rows >= 0) & (rows <= n)).all(1)
    if not bool(fine.all()):
        rank = int(fine.int().argmin())
        raise Malformed(f"{what} of rank {rank} are not sorted, unique and inside 0..{n - 1}")


def strictly_increasing(indices: Tensor, n: int, what: str) -> None:
    """Sorted, unique and inside 0..n-1: safe to scatter with on any device."""
    if not indices.numel():
        return
    first, last = int(indices[0]), int(indices[-1])
    if first < 0 or last >= n or not bool((indices[1:] > indices[:-1]).all()):
        raise Malformed(f"{what} are not sorted, unique and inside 0..{n - 1} (first {first}, last {last})")
