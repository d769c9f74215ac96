"""`bench traffic` on small vectors: what it counts, and the bound that ExDyna has to keep."""

from __future__ import annotations

from typing import Any

import pytest

from gradsieve_tools.bench import traffic
from gradsieve_tools.bench.traffic import (
    Case,
    measure,
)

N, DENSITY = 20_000, 0.1
K = 2_000


def bound(world: int) -> float:
    """Words over k (P-1)/P that ExDyna may need once settled: rows have room for the scatter of their counts,
    which is much of a row where k/P is as small as here."""
    return 2.6 + 4 / (K / world) ** 0.5


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "WINDOW", 20)
    monkeypatch.setattr(traffic, "CAP", 60)


def row(scheme: str, world: int) -> dict[str, Any]:
    return measure(Case(scheme, world, N, DENSITY))


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16, 32])
def test_exdyna_keeps_its_bound_on_skewed_gradients(world: int) -> None:
    found = row("exdyna", world)
    assert found["settled_after"] is not None
    assert found["settled_after"] <= 20
    assert found["times_k"] <= bound(world)
    assert found["words"] <= bound(world) * K * (world - 1) / world
    assert found["rounds"] == 3 * (world - 1).bit_length(), "an all-gather and an all-reduce"
    assert found["density"] == pytest.approx(DENSITY, rel=0.1)


@pytest.mark.parametrize("world", [4, 8, 16, 32])
def test_micro_breaks_the_same_bound_on_the_same_gradients(world: int) -> None:
    """The twin of the test above: the bound can fail, and the gradients are skewed enough to make it."""
    assert row("micro", world)["times_k"] > 1.05 * bound(world)


def test_top_k_grows_with_the_ranks_as_its_formula_says() -> None:
    rows = [row("topk", world) for world in (2, 8, 32)]
    for found in rows:
        assert found["words_received"] == found["formula_words"] == 2 * K * (found["world"] - 1)
        assert found["settled_after"] == 0
    assert rows[-1]["words_received"] > 10 * row("exdyna", 32)["words_received"]
