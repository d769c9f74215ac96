"""Gradients for trajectories: numbers on a grid, so that no order of adding them up rounds, and two programs
that do the same come to the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
STEPS = 200


@cache
def pool() -> Vector:
    return np.random.default_rng(5).standard_normal(1 << 18)


@dataclass(frozen=True)
class Gradients:
    """Noise around a mean that all ranks share, larger at hot places, by turns stronger and weaker."""

    n: int
    world: int
    scale: float = 1.0
    swing: float = 1.0
    """How far the scale moves up and down, on a logarithmic scale."""
    hot: int = 0
    """Elements at the front that are larger, by `heat`."""
    heat: float = 8.0
    grid: float = 2.0**-12

    def __call__(self, step: int, rank: int) -> Vector:
        place = (step * 7919 + rank * 104_729) % (pool().size - self.n)
        strength = self.scale * np.exp(self.swing * np.sin(step / 15))
        gradient = strength * (pool()[place : place + self.n] + 0.3 * pool()[: self.n])
        gradient[: self.hot] *= self.heat
        return np.round(gradient / self.grid) * self.grid
