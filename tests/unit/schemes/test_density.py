"""The count a user asked for is the count that travels: at any density and scale, after any jump of it."""

from __future__ import annotations

import statistics
from functools import cache

import pytest
import torch
from torch import Tensor

from gradsieve.schemes import make
from gradsieve.testing.ranks import Gradients, VirtualRanks

N, WORLD, STEPS, WINDOW, SETTLED, JUMP = 50_003, 4, 140, 50, 20, 70
TOLERANCE = 0.1

in_control = pytest.mark.parametrize("name", ["micro", "exdyna"])
densities = pytest.mark.parametrize("density", [0.1, 0.01, 0.001])


@cache
def pool() -> Tensor:
    return torch.randn(4_000_000, generator=torch.Generator().manual_seed(1))


def skewed(scale: float = 1.0, jump: float = 1.0, at: int = JUMP, drift: float = 0.3) -> Gradients:
    """A fixed mean and noise, large at the front of the vector and small at its end."""
    source = torch.Generator().manual_seed(2)
    envelope = torch.exp(3 * torch.linspace(0, -1, N)) * scale
    mean = torch.randn(N, generator=source) * drift

    def gradient(step: int, rank: int, bucket: int) -> Tensor:
        offset = int(torch.randint(0, pool().numel() - N, (), generator=source))
        noisy = (mean + pool()[offset : offset + N]).mul_(envelope)
        return noisy.mul_(jump) if step >= at else noisy

    return gradient


def counts(name: str, density: float, gradients: Gradients, steps: int = STEPS) -> list[float]:
    """Elements that travelled in each step, over k."""
    fleet = VirtualRanks(make(name, density), [N], WORLD)
    k = fleet.scheme.k(N)
    return [round_.outcomes[0].update.count / k for round_ in fleet.advance(gradients, steps)]


def worst_window(figures: list[float], first: int, last: int) -> float:
    """The mean farthest from 1 of all windows within the steps first..last-1."""
    means = [sum(figures[a : a + WINDOW]) / WINDOW for a in range(first, last - WINDOW + 1)]
    return max(means, key=lambda mean: abs(mean - 1))


@in_control
@densities
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_every_window_of_fifty_steps_is_within_a_tenth_of_the_target(
    name: str, density: float, scale: float
) -> None:
    figures = counts(name, density, skewed(scale))
    assert worst_window(figures, SETTLED, STEPS) == pytest.approx(1, abs=TOLERANCE)


@in_control
@densities
@pytest.mark.parametrize("jump", [100.0, 0.01])
def test_the_target_is_found_again_twenty_steps_after_a_hundredfold_jump(
    name: str, density: float, jump: float
) -> None:
    figures = counts(name, density, skewed(jump=jump), JUMP + SETTLED + WINDOW + 10)
    assert worst_window(figures, SETTLED, JUMP) == pytest.approx(1, abs=TOLERANCE)
    assert worst_window(figures, JUMP + SETTLED, len(figures)) == pytest.approx(1, abs=TOLERANCE)


@in_control
def test_the_target_is_kept_where_means_outweigh_the_noise(name: str) -> None:
    """Residuals then fill up in step with each other: the hardest case for a threshold."""
    figures = counts(name, 0.001, skewed(drift=3.0))
    assert worst_window(figures, SETTLED, STEPS) == pytest.approx(1, abs=TOLERANCE)


@in_control
def test_the_target_is_found_again_when_dead_elements_come_alive(name: str) -> None:
    """While too few elements are alive the threshold must not run away (integral wind-up)."""
    alive, source = torch.arange(N) % 10 < 3, skewed()

    def waking(step: int, rank: int, bucket: int) -> Tensor:
        gradient = source(step, rank, bucket)
        return gradient if step >= 60 else gradient * alive

    figures = counts(name, 0.5, waking, 130)
    assert worst_window(figures, 80, 130) == pytest.approx(1, abs=TOLERANCE)


FEW = 20_000


def steady(steep: float) -> Gradients:
    """A mean that stays, as where a training goes far in one direction; momentum takes ten steps to build up.
    Residuals then fill up in step, and all rows at once."""
    source = torch.Generator().manual_seed(6)
    mean = torch.randn(FEW, generator=source) * torch.exp(-steep * torch.linspace(0, 1, FEW))

    def gradient(step: int, rank: int, bucket: int) -> Tensor:
        return (mean + 0.3 * pool()[rank * FEW : (rank + 1) * FEW] * mean) * (1 - 0.9 ** (step + 1))

    return gradient


def held(steep: float, world: int, density: float) -> tuple[float, float]:
    """Mean count over k, and share of the rows that were cut, from step 20 on."""
    fleet = VirtualRanks(make("exdyna", density), [FEW], world)
    states = [round_.outcomes[0].state for round_ in fleet.advance(steady(steep), 70)][SETTLED:]
    count = statistics.fmean(state.sent for state in states) / fleet.scheme.k(FEW)
    return count, statistics.fmean(state.cut for state in states)


@pytest.mark.parametrize("steep", [0.0, 3.0])
@pytest.mark.parametrize("world", [4, 16])
@pytest.mark.parametrize("density", [0.05, 0.01])
def test_the_mean_is_within_a_twentieth_with_few_rows_cut(steep: float, world: int, density: float) -> None:
    count, cut = held(steep, world, density)
    assert count == pytest.approx(1, abs=0.05)
    assert cut < 0.2
