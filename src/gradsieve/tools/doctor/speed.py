"""What a rank's processors and memory do while all other ranks are at it as well, as they are in training."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from gradsieve import kernels

ELEMENTS = 1 << 23
"""32 MB: more than caches hold, little next to a model."""
WINDOW = 1.0
"""Seconds: ten periods of a processor quota, which lets everything pass at first."""
_THRESHOLD = 3.29
"""Of a Gaussian's elements one in a thousand is above it."""


@dataclass(frozen=True, slots=True)
class Speed:
    memory: float
    """Bytes read and written a second by copies."""
    selection: float
    """Elements a second that selections of one in a thousand looked at."""
    pace: float
    """Elements copied and looked at a second, over the whole window."""


def measure() -> Speed:
    seeded = torch.Generator().manual_seed(0)
    values = torch.randn(ELEMENTS, dtype=torch.float32, device="cpu", generator=seeded)
    copy = torch.empty_like(values)
    buffer = ELEMENTS // 250
    kernels.select(values, _THRESHOLD, buffer, 0.0)  # compiled by now
    copied = selected = 0.0
    times, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < WINDOW or not times:
        copy.copy_(values)
        between = time.perf_counter()
        kernels.select(values, _THRESHOLD, buffer, 0.0)
        copied, selected = copied + between - now, selected + time.perf_counter() - between
        times += 1
    seen = times * ELEMENTS
    return Speed(2 * values.itemsize * seen / copied, seen / selected, seen / (copied + selected))
