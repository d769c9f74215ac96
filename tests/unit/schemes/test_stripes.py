"""Stripes: everybody's turn comes, evenly; sums at agreed places; small tensors take turns too."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.comm import lockstep
from gradsieve.comm.ops import Meter
from gradsieve.kernels.blocks import BLOCK
from gradsieve.schemes.base import sum_agreed
from gradsieve.schemes.stripes import Stripes
from gradsieve.testing.gradients import Source
from gradsieve.testing.ranks import VirtualRanks
from gradsieve.types import Ctx
from gradsieve_tools import formulas


def stretches(n: int, density: float, steps: int, world: int = 4) -> list[tuple[int, int]]:
    fleet = VirtualRanks(Stripes(density=density), [n], world)
    rounds = fleet.advance(Source("normal", (n,)), steps)
    return [(each.outcomes[0].update.start, each.outcomes[0].update.stop) for each in rounds]


@given(n=st.integers(1, 5000), density=st.sampled_from([0.001, 0.03, 0.1, 0.3334, 0.46, 0.7, 0.999]))
def test_everything_has_its_turn_and_as_much_is_sent_as_asked_for(n: int, density: float) -> None:
    k = Stripes(density=density).k(n)
    turns = -(-n // k)
    steps = min(3 * turns, 60)
    seen = stretches(n, density, steps, world=2)
    assert all(now[0] == before[1] % n for before, now in pairwise(seen))
    if steps >= 2 * turns:
        marks = torch.zeros(n)
        for start, stop in seen[: 2 * turns]:
            marks[start:stop] += 1
        assert bool((marks > 0).all())
    assert sum(stop - start for start, stop in seen) <= steps * max(k, BLOCK) + n, "a block at least"


@pytest.mark.parametrize("values", ["exact", "bf16", "int8", "int4", "int2", "sign"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("count", [0, 1, 5, 1000, 1027])
def test_what_ranks_gave_is_the_sum(values: str, world: int, count: int) -> None:
    source = torch.Generator().manual_seed(count)
    mine = [torch.randn(count, generator=source) for _ in range(world)]
    for step in range(3):
        programs = [
            sum_agreed(own.clone(), values, Ctx(rank, world, step))  # type: ignore[arg-type]
            for rank, own in enumerate(mine)
        ]
        answers = lockstep.run(programs)
        total = answers[0][0]
        assert all(torch.equal(answer[0], total) for answer in answers)
        given_ = torch.stack([answer[1] for answer in answers]).double().sum(0)
        torch.testing.assert_close(given_, total.double(), rtol=1e-5, atol=1e-5)


def test_what_one_rank_alone_says_reaches_all_in_few_bits() -> None:
    programs = [
        sum_agreed(torch.full((512,), float(rank == 2)), "sign", Ctx(rank, 4, 1)) for rank in range(4)
    ]
    for total, _ in lockstep.run(programs):
        assert torch.equal(total, torch.ones(512))


@pytest.mark.parametrize("world", [2, 4, 16])
def test_bytes_are_flat_in_the_number_of_ranks(world: int) -> None:
    n = 100_000
    scheme = Stripes(density=0.25)
    meters = [Meter(rank, world) for rank in range(world)]
    programs = [
        scheme.exchange(torch.randn(n), scheme.begin(n, world), Ctx(rank, world, 0)) for rank in range(world)
    ]
    lockstep.run(programs, meters)
    meter = meters[0]
    assert 8 * meter.moved / n == pytest.approx(2 * 0.25 * (1 + 1 / 16) * (world - 1) / world, rel=0.05)
    assert 4 * formulas.words(scheme, n, world) == pytest.approx(meter.moved, rel=0.05)
