"""The only door for a peer's indices: nothing is scattered before it went through here."""

from __future__ import annotations

from torch import Tensor

from gradsieve.errors import Malformed


def counts_within(counts: Tensor, limit: int, what: str) -> None:
    """Every rank's count is in 0..limit."""
    bad = ((counts < 0) | (counts > limit)).nonzero().flatten()
    if bad.numel():
        rank = int(bad[0])
        raise Malformed(f"rank {rank} announced {int(counts[rank])} {what}; between 0 and {limit} are possible")


def strictly_increasing(indices: Tensor, n: int, what: str) -> None:
    """Sorted, unique and inside 0..n-1: safe to scatter with on any device."""
    if not indices.numel():
        return
    first, last = int(indices[0]), int(indices[-1])
    if first < 0 or last >= n or not bool((indices[1:] > indices[:-1]).all()):
        raise Malformed(f"{what} are not sorted, unique and inside 0..{n - 1} (first {first}, last {last})")
