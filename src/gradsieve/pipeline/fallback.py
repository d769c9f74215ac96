"""Dense where that is faster, unit by unit, by what exchanges were seen to cost.

A rank's seconds for the exchange of a unit are piggybacked on the all-reduce of the next one, so that all
ranks know the same mean and choose alike, without a message for it.

    sparse   seconds of the scheme's exchange, the quickest lately: the others waited for a slow rank
    dense    the same of a dense one; until one was tried, what its bytes alone need by the links

Dense is tried where its bytes alone would be faster than the scheme, so that a slow link never sees it; the
way not taken is tried again from time to time where it is not far behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FORGET = 1.2
"""By which the quickest grows with every exchange that is slower."""
WARM_UP = 8
"""Exchanges that are not evaluated: thresholds and partitions have yet to converge."""
AGAIN = 200
"""Exchanges after which the other way is tried again."""
FAR = 2.0
"""Times the seconds of the way taken from which on the other is left alone for good."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """Of one unit; the same on every rank."""

    dense: float
    sparse: float = 0.0
    tried: bool = False
    """Whether `dense` was seen, or is what the links promise."""
    seen: int = 0
    since: int = 0
    """Exchanges evaluated, and since the other way was last taken."""

    @property
    def goes_dense(self) -> bool:
        """In the next exchange."""
        if self.seen <= WARM_UP:
            return False
        faster = self.dense < self.sparse
        other = self.sparse if faster else self.dense
        again = self.tried and self.since >= AGAIN and other < FAR * min(self.dense, self.sparse)
        return faster != again

    def __str__(self) -> str:
        way, other = ("dense", "sparse") if self.goes_dense else ("sparse", "dense")
        known = "" if self.tried else ", as the links promise"
        return (
            f"goes {way} from here on, not {other}: an exchange takes {1e3 * self.sparse:.2f} ms sparse and "
            f"{1e3 * self.dense:.2f} ms dense{known}"
        )

    def after(self, seconds: float, dense: bool) -> Fallback:
        """One more exchange took, in the mean over ranks, so long."""
        now = replace(self, seen=self.seen + 1)
        since = self.since + 1 if dense == (self.dense < self.sparse) else 0
        if dense:
            known = min(seconds, FORGET * self.dense) if self.tried else seconds
            return replace(now, dense=known, tried=True, since=since)
        known = min(seconds, FORGET * self.sparse) if self.sparse else seconds
        return replace(now, sparse=known, since=since)
