"""What a rank computes with does while all other ranks are at it as well, as they are in training: its
accelerator and that one's memory, or its processors and theirs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from gradsieve import kernels

ELEMENTS = 1 << 23  # 32 MB: more than caches hold, little next to a model
WINDOW = 1.0  # seconds: ten periods of a processor quota, which lets everything pass at first
_THRESHOLD = 3.29  # exceeded by one Gaussian element in a thousand
_LAUNCHES = 1000


@dataclass(frozen=True, slots=True)
class Speed:
    memory: float  # bytes read and written a second by copies
    selection: float  # elements a second that selections of one in a thousand looked at
    pace: float  # elements copied and looked at a second, over the whole window
    launch: float  # seconds of a kernel launch; 0 without an accelerator


def measure() -> Speed:
    device = _device()
    seeded = torch.Generator().manual_seed(0)
    values = torch.randn(ELEMENTS, dtype=torch.float32, device="cpu", generator=seeded).to(device)
    copy = torch.empty_like(values)
    buffer = ELEMENTS // 250
    kernels.select(values, _THRESHOLD, buffer, 0.0)  # compiled by now
    _settle(device)
    copied = selected = 0.0
    times, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < WINDOW or not times:
        copy.copy_(values)
        _settle(device)
        between = time.perf_counter()
        kernels.select(values, _THRESHOLD, buffer, 0.0)
        _settle(device)
        copied, selected = copied + between - now, selected + time.perf_counter() - between
        times += 1
    seen = times * ELEMENTS
    launch = 0.0 if device.type == "cpu" else seconds_of_launch(device)
    return Speed(2 * values.itemsize * seen / copied, seen / selected, seen / (copied + selected), launch)


def seconds_of_launch(device: torch.device) -> float:
    """The mean over many ops that have next to nothing to do."""
    tiny = torch.zeros(1, dtype=torch.float32, device=device)
    tiny.add_(1.0)
    _settle(device)
    begin = time.perf_counter()
    for _ in range(_LAUNCHES):
        tiny.add_(1.0)
    _settle(device)
    return (time.perf_counter() - begin) / _LAUNCHES


def _device() -> torch.device:
    """This rank's accelerator, where there is one."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device(kind.type, local % torch.accelerator.device_count())


def _settle(device: torch.device) -> None:
    """An accelerator has only queued it so far."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
