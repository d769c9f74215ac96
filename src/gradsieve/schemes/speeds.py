"""Workers that are not equally fast: how many times another worker's work each of them can do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradsieve.errors import ConfigError


def check_speeds(speeds: tuple[float, ...] | None) -> None:
    if speeds is not None and not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise ConfigError(f"speeds must be positive numbers, one for each rank, not {speeds!r}")


def shares_of_work(speeds: tuple[float, ...] | None, world: int) -> Tensor:
    """Returns each rank's part of all work, in rank order; equal parts where no speeds are given."""
    if speeds is None:
        return torch.full((world,), 1.0 / world, dtype=torch.float64, device="cpu")
    if len(speeds) != world:
        raise ConfigError(f"speeds has {len(speeds)} numbers for {world} ranks: give one for each rank")
    given = torch.tensor(speeds, dtype=torch.float64, device="cpu")
    return given / given.sum()
