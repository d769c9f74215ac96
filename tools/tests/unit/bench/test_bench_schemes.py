"""`bench schemes` on small vectors: every column, and schemes that are seen to do badly."""

from __future__ import annotations

import pytest
import torch

from gradsieve.schemes import SCHEMES, make
from gradsieve_tools.bench.common.recordings import Recording
from gradsieve_tools.bench.schemes.measure import COLUMNS, measure
from gradsieve_tools.specs import parse
from laws.toys import LosesMass, Toy

N, STEPS, WORLD, DENSITY = 2_000, 6, 4, 0.05


@pytest.fixture(scope="module")
def recording() -> Recording:
    """A steep common mean with noise of its own on every rank and in every step."""
    random = torch.Generator().manual_seed(0)
    envelope = torch.exp(-8 * torch.rand(N, generator=random))
    noise = torch.randn(STEPS, WORLD, N, generator=random)
    return Recording([N - 700, 600, 100], envelope * (0.5 + noise), losses=[])


def row(text: str, recording: Recording, world: int = WORLD) -> dict[str, float]:
    return measure(parse(text, DENSITY), recording, world, DENSITY)


TALKING = [name for name, kind in SCHEMES.items() if not kind.no_comm]


@pytest.mark.parametrize("scheme", TALKING)
def test_every_scheme_has_a_complete_row_and_loses_nothing(scheme: str, recording: Recording) -> None:
    found = row(scheme, recording)
    assert {"scheme", *found} == set(COLUMNS)
    assert found["lost"] < 1e-5
    assert found["fidelity"] <= 1 + 1e-9
    assert found["imbalance"] >= 0
    assert found["select_ms"] > 0


def test_a_scheme_that_drops_mass_is_seen(recording: Recording) -> None:
    assert measure(LosesMass(), recording, WORLD, DENSITY)["lost"] > 1e-4
    assert measure(Toy(), recording, WORLD, DENSITY)["lost"] < 1e-5


def test_a_scheme_that_does_not_look_has_low_fidelity(recording: Recording) -> None:
    """Toy sends every third place, whatever is there."""
    blind = measure(Toy(density=0.3), recording, WORLD, 0.3)
    seeing = measure(make("topk", 0.3), recording, WORLD, 0.3)
    assert blind["of_target"] == pytest.approx(1, abs=0.2)
    assert blind["fidelity"] < 0.6 < 0.8 < seeing["fidelity"]
