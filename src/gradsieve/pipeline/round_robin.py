"""Bits in the mean over some exchanges: one's own say little, as stripes are longer or shorter each time.

The mean is over whole rounds, where elements are sent round robin, and over `LEAST` exchanges at least:
two rounds differ in length as well.
"""

from __future__ import annotations

import statistics

LEAST = 20


class Turns:
    """Of one rank. What `flush()` sends is no part of them."""

    def __init__(self) -> None:
        self.bits = 0.0
        """In the mean over the last whole rounds, or over what there was so far of the first ones."""
        self._seen: list[float] = []
        self._are_first = True

    def add(self, bits: float, is_over: bool) -> None:
        """One more exchange, and whether a round robin of the elements ends with it."""
        self._seen.append(bits)
        are_over = is_over and len(self._seen) >= LEAST
        if self._are_first or are_over:
            self.bits = statistics.fmean(self._seen)
        if are_over:
            self._seen, self._are_first = [], False
