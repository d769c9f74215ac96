"""Latency and bandwidth of every pair of ranks, in rounds in which each rank has one partner.

Rounds are those of a round-robin tournament, in which each pair plays once: P - 1 of them (P where P is odd,
and one rank has none). All pairs of a round measure at once, as ranks do in a collective; links that pairs
share are shared. With many ranks only some of the rounds are held, at equal distances.

A pair measures

    latency     seconds for a word each way at once, the quickest of a few: a round of short messages
    bandwidth   bit/s from one to the other, then back, the latency taken off; messages grow until one takes
                long enough for a clock, or is as large as they get
    message     processor time, of all of a process's threads, for a word sent and one received
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

MOST_ROUNDS = 64
# The quickest counts: a rank that had to wait for a processor says nothing about its link
SHORT_TRIES, LONG_TRIES = 10, 5
SMALLEST, LARGEST, GROWTH = 1 << 16, 1 << 24, 4  # bytes of long messages
# Seconds that a long message should take, and times the latency: TCP needs round trips to come to speed
LONG_ENOUGH, LATENCIES = 0.02, 8.0
WAIT = timedelta(seconds=15)  # for a partner; a silent pair is given up


@dataclass(slots=True)
class Seen:
    latency: dict[int, float] = field(default_factory=dict)
    incoming: dict[int, float] = field(default_factory=dict)  # bit/s from that rank to this one
    failed: dict[int, str] = field(default_factory=dict)
    message: float = 0.0


def rounds(world: int, most: int = MOST_ROUNDS) -> list[int]:
    """The rounds to be held."""
    there = _odd(world)
    if world < 2 or there <= most:
        return list(range(there if world > 1 else 0))
    return [number * there // most for number in range(most)]


def partner(world: int, number: int, rank: int) -> int | None:
    """The partner of this rank in a round; None where it has none.

    In round r ranks a and b are partners where a + b is r, modulo an odd number m. One rank would be its own
    partner: its partner is rank m, or none where there is no such rank.
    """
    m = _odd(world)
    if rank == m:
        other = number * (m + 1) // 2 % m
    else:
        other = (number - rank) % m
        other = m if other == rank else other
    return other if other < world else None


def _odd(world: int) -> int:
    return world - 1 if world % 2 == 0 else world


def measure(
    rank: int, world: int, together: Callable[[str], bool], tell: Callable[[str], None] = lambda _: None
) -> Seen:
    """Measure all rounds, on every rank at once. `together` waits for all ranks."""
    seen = Seen()
    used, spent, messages = rounds(world), 0.0, 0
    for turn, number in enumerate(used, 1):
        if not together(f"round {number}"):
            break  # some rank is gone; what was measured is reported
        other = partner(world, number, rank)
        if other is not None:
            try:
                pair = _Pair(rank, other)
                latency, computed = pair.latency()
                seen.latency[other] = latency
                spent, messages = spent + computed, messages + SHORT_TRIES
                for sender in (min(rank, other), max(rank, other)):
                    bits = pair.bandwidth(sender, latency)
                    if sender == other:
                        seen.incoming[other] = bits
            except RuntimeError as error:
                seen.failed[other] = str(error)[:200]
        tell(f"round {turn} of {len(used)}")
    seen.message = spent / messages if messages else 0.0
    return seen


class _Pair:
    def __init__(self, rank: int, other: int) -> None:
        self.rank, self.other = rank, other
        self._swap()  # they come from other partners: the first to arrive waits

    def latency(self) -> tuple[float, float]:
        """Seconds of the quickest, the same on both sides, and processor time of all."""
        computed, quickest = time.process_time(), math.inf
        for _ in range(SHORT_TRIES):
            start = time.perf_counter()
            self._swap()
            quickest = min(quickest, time.perf_counter() - start)
        computed = time.process_time() - computed
        return min(quickest, self._swap(quickest)), computed

    def bandwidth(self, sender: int, latency: float) -> float:
        """bit/s. Both sides know the same figures, and so end with the same size."""
        best = 0.0
        for size in _sizes():
            # The first of a size says how long TCP takes to come to speed, not how fast it is then.
            seconds = min(self._timed(sender, size) for _ in range(2))
            is_enough = seconds >= max(LONG_ENOUGH, LATENCIES * latency) or size >= LARGEST
            if not is_enough:
                continue
            seconds = min(seconds, *(self._timed(sender, size) for _ in range(LONG_TRIES - 2)))
            best = 8 * size / max(seconds - latency, seconds / 10)
            break
        return best

    def _timed(self, sender: int, size: int) -> float:
        """Seconds until the receiver has it, by the receiver's clock, on both sides."""
        block = torch.zeros(size, dtype=torch.uint8, device="cpu")
        self._swap()
        if sender == self.rank:
            _wait(dist.isend(block, self.other))
            return self._swap()
        start = time.perf_counter()
        _wait(dist.irecv(block, self.other))
        seconds = time.perf_counter() - start
        self._swap(seconds)
        return seconds

    def _swap(self, seconds: float = 0.0) -> float:
        """A word each way: the other's seconds."""
        mine = torch.tensor([seconds], dtype=torch.float64, device="cpu")
        reply = torch.zeros(1, dtype=torch.float64, device="cpu")
        moves = [dist.irecv(reply, self.other), dist.isend(mine, self.other)]
        for move in moves:
            _wait(move)
        seconds = float(reply)
        if not 0.0 <= seconds < math.inf:
            raise RuntimeError(f"rank {self.other} sent {seconds} seconds, which no clock shows")
        return seconds


def _sizes() -> Iterator[int]:
    size = SMALLEST
    while size <= LARGEST:
        yield size
        size *= GROWTH


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait(WAIT)


def matrix(world: int, rows: dict[int, dict[int, float]], to_row: bool) -> list[list[float | None]]:
    """Row: who sends, column: who receives. Rows of what came in are columns here (`to_row` is False)."""
    found: list[list[float | None]] = [[None] * world for _ in range(world)]
    for rank, values in rows.items():
        for other, value in values.items():
            row, column = (rank, other) if to_row else (other, rank)
            found[row][column] = value
    return found
