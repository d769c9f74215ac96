"""ExDyna: partitions find their balance and cannot stall, owners rotate, two collectives a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.ops import Meter
from gradsieve.schemes import exdyna, make
from gradsieve.schemes.exclusive import HEADER
from gradsieve.schemes.exdyna import ExDyna
from gradsieve.schemes.shares import quota, shares_of_work
from gradsieve.schemes.threshold import FACTORS
from gradsieve.testing.gradients import Source
from gradsieve.testing.ranks import Gradients, VirtualRanks
from gradsieve.types import Ctx

N, WORLD, DENSITY = 65_537, 8, 0.05
BALANCED = 1.15
"""Longest selection over the mean that counts as balanced."""


@cache
def pool() -> Tensor:
    return torch.randn(2_000_000, generator=torch.Generator().manual_seed(3))


def noise(envelope: Callable[[int], Tensor]) -> Gradients:
    source = torch.Generator().manual_seed(4)

    def gradient(step: int, rank: int, bucket: int) -> Tensor:
        offset = int(torch.randint(0, pool().numel() - N, (), generator=source))
        return pool()[offset : offset + N] * envelope(step)

    return gradient


def imbalances(name: str, density: float, gradients: Gradients, sizes: tuple[int, int, int]) -> list[float]:
    """Longest selection over the mean in each step; sizes: n, P and the number of steps."""
    n, world, steps = sizes
    fleet = VirtualRanks(make(name, density), [n], world)
    return [
        fleet.scheme.report(round_.outcomes[0].state)["imbalance"]
        for round_ in fleet.advance(gradients, steps)
    ]


def mean(figures: list[float]) -> float:
    return sum(figures) / len(figures)


def slope() -> Tensor:
    return torch.exp(-3 * torch.linspace(0, 1, N))


def hill(start: float) -> Tensor:
    """One eighth of the vector stands out."""
    place = torch.linspace(0, 1, N)
    return torch.where((place >= start) & (place < start + 0.125), 1.0, 0.3)


SKEWS = {"slope": (slope(), slope().flip(0)), "hill": (hill(0.25), hill(0.75))}


@pytest.mark.parametrize("skew", SKEWS)
def test_partitions_balance_on_skewed_gradients_and_again_when_the_skew_moves(skew: str) -> None:
    first, second = SKEWS[skew]
    gradients = noise(lambda step: first if step < 50 else second)
    figures = imbalances("exdyna", DENSITY, gradients, (N, WORLD, 100))
    assert mean(figures[40:50]) < BALANCED
    assert mean(figures[50:55]) > BALANCED, "the skew that moved should have shown"
    assert mean(figures[90:]) < BALANCED


def plateau(n: int = 32_768) -> Tensor:
    """Loads of 200, 100, 100 and 0 in four equal partitions: the heavy one has an average neighbour only."""
    gradient, source = torch.zeros(4, n // 4), torch.Generator().manual_seed(5)
    for part, load in enumerate([200, 100, 100]):
        places = torch.arange(load) * (n // 4 // load)
        gradient[part, places] = 1000 * (1 + torch.rand(load, generator=source))
    return gradient.flatten()


def test_balancing_does_not_stall_where_the_published_rule_does() -> None:
    """A partition sheds load in the paper only to a neighbour below the mean, so that a plateau blocks it."""
    gradient = plateau()
    sizes = (gradient.numel(), 4, 60)
    density = 400 / gradient.numel()
    ours, published = (
        imbalances(name, density, lambda *_: gradient, sizes) for name in ("exdyna", "exdyna-paper")
    )
    assert max(ours[30:]) < BALANCED
    assert published[30:] == pytest.approx([2.0] * 30, abs=0.01)  # one element by turns where there is none


@pytest.mark.parametrize("name", ["micro", "exdyna", "exdyna-paper", "micro-paper"])
@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_over_p_steps_every_rank_owns_every_partition_once(name: str, world: int) -> None:
    """A rank that alone has something to tell tells what lies in the partition it owns."""
    n = 100 * world
    scheme = make(name, 0.5)
    owned = []
    for step in range(3, 3 + world):
        for rank in range(world):
            accs = [torch.ones(n) * (r == rank) for r in range(world)]
            states = [scheme.begin(n, world) for _ in accs]
            programs = [scheme.exchange(acc, states[r], Ctx(r, world, step)) for r, acc in enumerate(accs)]
            told = Counter(int(index) // 100 for index in lockstep.run(programs)[0].update.listed())
            owned += [(rank, part) for part, count in told.items() if count > 1]  # one alone is told by turns
    assert sorted(owned) == [(rank, part) for rank in range(world) for part in range(world)]


@pytest.mark.parametrize(
    ("name", "collectives"), [("micro", 2), ("exdyna", 2), ("exdyna-paper", 3), ("micro-paper", 3)]
)
@pytest.mark.parametrize("world", [2, 4, 7])
def test_a_step_is_exactly_two_collectives_and_three_as_published(
    name: str, collectives: int, world: int
) -> None:
    scheme, n = make(name, 0.05), 4001
    for step in range(3):
        meters = [Meter(rank, world) for rank in range(world)]
        accs = [torch.randn(n, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
        state = scheme.begin(n, world)
        lockstep.run([scheme.exchange(accs[r], state, Ctx(r, world, step)) for r in range(world)], meters)
        assert [meter.collectives for meter in meters] == [collectives] * world


@pytest.mark.parametrize("name", ["micro", "exdyna"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_indices_travel_packed(name: str, dtype: torch.dtype) -> None:
    """In five or six bits at this density, where plain ones have 32."""
    scheme = make(name, 0.1)
    program = scheme.exchange(torch.ones(1000, dtype=dtype), scheme.begin(1000, 2), Ctx(0, 2, 0))
    row = program.send(None).tensor
    assert row.dtype == torch.uint8
    assert row.numel() <= HEADER + 1.125 * 100 / 2 * 6 / 8


@pytest.mark.parametrize("total", [0.0, 0.4, 1.0, 3.0, 17.0, 1000.5])
@pytest.mark.parametrize("world", [1, 3, 8])
def test_quotas_add_up_to_the_total_and_pass_nobody_over(total: float, world: int) -> None:
    quotas = torch.stack([quota(torch.ones(world), total, step) for step in range(50 * world)])
    assert bool((quotas >= 0).all())
    assert bool(((quotas.sum(1) - total).abs() < 1).all())
    assert bool((quotas.sum(0) > 0).all()) == (total > 0)
    assert torch.allclose(quotas.double().mean(0), torch.full((world,), total / world).double(), atol=0.1)


@pytest.mark.parametrize("name", ["micro", "exdyna"])
@pytest.mark.parametrize(
    ("threshold", "count"), [(2.0**-126, 30), (3.4e38, 170), (2.0**-126, 170), (1.0, 100)]
)
def test_a_threshold_stays_a_normal_float32_whatever_the_count_asks_for(
    name: str, threshold: float, count: int
) -> None:
    """Below, |x| >= threshold would be true of zeros; above, nothing could ever be selected again."""
    scheme, limits = make(name, 0.1), torch.finfo(torch.float32)
    state = scheme.begin(1000, 4)
    for _ in range(30):
        curve = torch.tensor(FACTORS, dtype=torch.float64) * count
        seen = replace(
            state, threshold=threshold, demand=float(count), sent=count, tail=count / 2, curve=curve
        )
        state = scheme.next_states([seen])[0]
        threshold = state.threshold
        assert limits.tiny <= threshold <= limits.max


@pytest.mark.parametrize(("speeds", "share"), [((3.0, 1.0), 0.75), (None, 0.5), ((1.0, 9.0), 0.1)])
def test_a_rank_selects_in_proportion_to_its_speed(speeds: tuple[float, ...] | None, share: float) -> None:
    """Of elements to look at and of elements found, whichever partition it has."""
    scheme = ExDyna(density=0.05, speeds=speeds)
    fleet, found = VirtualRanks(scheme, [20_000], 2), torch.zeros(2)
    for round_ in fleet.advance(Source("skewed", (20_000,)), 30):
        if round_.step < 10:
            continue
        if round_.step // 2 % exdyna._EVEN_TURNS == exdyna._EVEN_TURNS - 1:
            continue
        parts = shares_of_work(speeds, 2).roll(round_.step % 2).numpy()
        cuts = exdyna._in_proportion(round_.states[0].cuts.numpy(), parts)
        first = (round_.outcomes[0].update.on_host() < cuts[1]).mean()
        counts = torch.tensor([first, 1 - first])
        found += counts.roll(-round_.step % 2)  # partition p is with rank (p - step) mod P
    assert float(found[0] / found.sum()) == pytest.approx(share, abs=0.05)


def test_a_slow_rank_looks_everywhere_in_the_end() -> None:
    """What waits on it alone is not passed over for ever because its partitions are small."""
    n, world = 60, 3
    fleet = VirtualRanks(ExDyna(density=0.1, speeds=(1.0, 4.0, 7.0)), [n], world)

    def once(step: int, rank: int, bucket: int) -> Tensor:
        return torch.arange(1.0, n + 1) * (step == 0 and rank == 0)

    for _ in fleet.advance(once, 10 * exdyna._EVEN_TURNS * world):
        pass
    assert not fleet.residuals[0][0].any()


def test_without_balancing_cuts_stay_and_without_control_the_threshold_does() -> None:
    gradients = Source("skewed", (4000,))
    for scheme, fixed in (
        (ExDyna(density=0.05, balance=False), "cuts"),
        (ExDyna(density=0.05, control=False), "threshold"),
        (ExDyna(density=0.05), None),
    ):
        fleet, seen = VirtualRanks(scheme, [4000], 4), []
        for _ in range(6):
            for _ in fleet.advance(gradients, 1):
                pass
            state = fleet.states[0][0]
            seen.append((state.cuts.tolist(), state.threshold))
        assert (len({str(cuts) for cuts, _ in seen}) == 1) == (fixed == "cuts")
        assert (len({threshold for _, threshold in seen}) == 1) == (fixed == "threshold")
