"""`gradsieve bench bits`: what an exchange tells, what it costs, and where the bound lies."""

from __future__ import annotations

import pytest
import torch

from gradsieve.schemes import SCHEMES
from gradsieve.types import Sparse
from gradsieve.wire.values import VALUE_CODECS
from gradsieve_tools.bench.bits import measure as bits
from gradsieve_tools.bench.bits.measure import Waiting
from gradsieve_tools.specs import parse
from tiny_task import tiny

__all__ = ["tiny"]

WORLD, N = 4, 8192
LOSSY = [name for name, kind in SCHEMES.items() if not kind.no_comm and not kind.lossless]


def gaussian(snapshots: int = 2, alike: bool = False) -> Waiting:
    random = torch.Generator().manual_seed(1)
    vectors = torch.randn(snapshots, 1 if alike else WORLD, N, generator=random)
    return Waiting([N - 100, 100], vectors.expand(snapshots, WORLD, N).contiguous())


@pytest.mark.parametrize("name", LOSSY)
def test_everything_as_it_is_tells_all_and_costs_an_all_reduce(name: str) -> None:
    settings = ":values=exact" if name == "stripes" else ""
    found = bits.measure(parse(name + settings, 1.0), gaussian())
    assert found["known"] == pytest.approx(1.0, abs=1e-6)
    assert found["bits"] == 2 * 32 * (WORLD - 1) / WORLD


def test_known_is_what_is_no_longer_missing() -> None:
    mean = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    assert bits.share_known(mean, Sparse.run(1, torch.tensor([8.0]), 3), world=2) == pytest.approx(16 / 25)
    assert bits.share_known(mean, Sparse.run(0, torch.tensor([5.0, 8.0]), 3), world=2) == pytest.approx(
        1 - 0.25 / 25
    )
    too_much = Sparse.run(0, torch.tensor([18.0]), 3)
    assert bits.share_known(mean, too_much, world=2) == pytest.approx(1 - (36 + 16) / 25)
    assert bits.share_known(torch.zeros(3, dtype=torch.float64), Sparse.full(torch.zeros(3)), world=2) == 1.0


def test_the_bound_rises_from_nothing_to_all_and_one_bit_up_and_down_leave_a_quarter() -> None:
    at = [bits.bound(0.1 * step, WORLD) for step in range(100)]
    assert at[0] == 0.0
    assert at == sorted(set(at))
    assert at[-1] < 1.0
    assert bits.bound(2 * (WORLD - 1) / WORLD, WORLD) == pytest.approx(0.75)


@pytest.mark.parametrize("density", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("values", VALUE_CODECS)
def test_no_round_robin_beats_the_bound_of_a_gaussian(values: str, density: float) -> None:
    found = bits.measure(parse(f"stripes:values={values}", density), gaussian(1, alike=True))
    assert 0.0 < found["known"] <= found["bound"]


def test_stripes_are_measured_over_whole_rounds() -> None:
    """One element holds everything: a stretch tells all of it or nothing, a round its turn's share."""
    n = 128 * 256  # so that the shortest stretch is a block
    for place in (0, n // 2, n - 1):
        vectors = torch.zeros(3, WORLD, n)
        vectors[:, :, place] = 1.0
        for density, turns in [(0.25, 4), (1 / 128, 128)]:  # a round on every snapshot, and one on all
            found = bits.measure(parse("stripes:values=exact", density), Waiting([n], vectors))
            assert found["known"] == pytest.approx(1 / turns)
            assert found["bits"] == pytest.approx(48 / turns)
