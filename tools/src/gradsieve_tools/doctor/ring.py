"""What a sum over all ranks takes by gloo itself: around a ring, each rank to the next, all at once.

Pairs do not say it where links differ: of two sites a ring crosses what joins them once each way, however
many ranks there are, and pairs that are measured at once cross it together.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from gradsieve.comm.links import Links
from gradsieve_tools.doctor.pairs import LATENCIES, LONG_ENOUGH

SIZES = tuple(1 << bits for bits in (18, 20, 22, 24))  # bytes
SHORT_TRIES, TRIES = 5, 2  # the quickest counts. TCP has come to speed by the second.
_WORD = 4


def measure(world: int) -> Links | None:
    """Return the same on all ranks; None for one alone. Raise RuntimeError if a rank does not answer."""
    if world < 2:
        return None
    latency = _seconds(_WORD * world, SHORT_TRIES)
    for size in SIZES:
        seconds = _seconds(size, TRIES)
        if seconds >= max(LONG_ENOUGH, LATENCIES * latency):
            break
    words = 2 * (world - 1) / world * size / _WORD
    return Links(latency, max(seconds - latency, seconds / 10) / words)


def _seconds(size: int, tries: int) -> float:
    vector = torch.zeros(size // _WORD, dtype=torch.float32, device="cpu")
    quickest = torch.full((1,), torch.inf, dtype=torch.float64, device="cpu")
    for _ in range(tries):
        start = time.perf_counter()
        dist.all_reduce(vector)
        quickest.clamp_(max=time.perf_counter() - start)
    dist.all_reduce(quickest, dist.ReduceOp.MAX)
    return float(quickest)
