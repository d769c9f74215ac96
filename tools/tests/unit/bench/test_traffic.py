"""`bench traffic` on small vectors: what it counts, and the bound that ExDyna has to keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsieve.errors import ConfigError
from gradsieve.schemes import SCHEMES
from gradsieve_tools.bench import traffic
from gradsieve_tools.bench.traffic import (
    COLUMNS,
    Case,
    Fleet,
    Gradients,
    Step,
    layers,
    measure,
    settled_after,
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


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("world", [2, 5])
def test_every_scheme_has_a_complete_row(scheme: str, world: int) -> None:
    found = row(scheme, world)
    assert set(COLUMNS) <= set(found)
    assert (found["scheme"], found["world"]) == (scheme, world)
    assert found["words_received"] >= 0
    assert found["words_sent"] >= 0
    assert 0 < found["density"] <= 1


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


@pytest.mark.parametrize("world", [4, 16])
@pytest.mark.parametrize(("values", "bound"), [("bf16", 1.8), ("int8", 1.3)])
def test_rounded_values_need_half_the_words_and_less(world: int, values: str, bound: float) -> None:
    found = row(f"exdyna:values={values}", world)
    assert found["times_k"] <= bound
    assert found["density"] == pytest.approx(DENSITY, rel=0.1)


@pytest.mark.parametrize("world", [4, 8])
def test_deft_packs_the_tensors_of_a_real_model(world: int) -> None:
    sizes = layers("transformer", N)
    assert len(sizes) == 102
    assert 0.8 * N < sum(sizes) < 1.2 * N
    packed = measure(Case("deft", world, sum(sizes), DENSITY, sizes))
    assert packed["times_k"] < 4.2
    # The twin: of one tensor only equal pieces can be made, and one of them has most of the mass.
    assert row("deft", world)["times_k"] > 1.2 * packed["times_k"]


def test_exact_steps_are_in_the_mean_and_not_in_the_worst() -> None:
    found = row("oktopk", 8)
    mean = found["mean_times_k"] * K * 7 / 8
    usual = (traffic.PERIOD * mean - found["exact_words"]) / (traffic.PERIOD - 1)
    assert found["words"] < found["exact_words"]
    assert usual < found["words"] < mean + found["exact_words"] / traffic.PERIOD
    assert row("topk", 8)["mean_times_k"] == row("topk", 8)["times_k"]


def test_top_k_grows_with_the_ranks_as_its_formula_says() -> None:
    rows = [row("topk", world) for world in (2, 8, 32)]
    for found in rows:
        assert found["words_received"] == found["formula_words"] == 2 * K * (found["world"] - 1)
        assert found["settled_after"] == 0
    assert rows[-1]["words_received"] > 10 * row("exdyna", 32)["words_received"]


def test_dense_and_noop_move_what_they_must() -> None:
    assert row("dense", 4)["words_received"] == 2 * N * 3 / 4
    assert row("noop", 4)["words_received"] == 0


def test_residuals_are_kept_and_no_gradient_is_lost() -> None:
    fleet = Fleet(Case("exdyna", 2, N, DENSITY))
    given = torch.zeros(N)
    usual = fleet.gradients.add_to

    def counted(acc: torch.Tensor) -> None:
        before = acc.clone()
        usual(acc)
        given.add_(acc - before)

    fleet.gradients.add_to = counted  # type: ignore[method-assign]
    first = fleet.step()
    kept = fleet.residuals.sum(0)
    moved = (given - kept).abs() > 1e-6
    assert int(moved.sum()) <= round(first.density * N)
    assert int((kept == 0).sum()) >= 0.95 * first.density * N


def test_gradients_are_skewed_alike_and_different_every_time() -> None:
    gradients = Gradients(N, scale=1.0)
    samples = torch.zeros(400, N)
    for sample in samples:
        gradients.add_to(sample)
    assert not torch.equal(samples[0], samples[1])
    mean = samples.mean(0)
    assert torch.nn.functional.cosine_similarity(mean, gradients.envelope, dim=0) > 0.95
    quarters = samples.abs().sum(0).view(4, -1).sum(1)
    assert quarters[0] > 3 * quarters[1:].sum()
    twin = torch.zeros(N)
    Gradients(N, scale=1.0).add_to(twin)
    assert torch.equal(twin, samples[0])  # the same seed, the same run


STEP = Step(
    words=100.0,
    words_sent=100.0,
    words_received=100.0,
    rounds=1,
    collectives=1,
    formula_words=100.0,
    least_words=90.0,
    most_words=110.0,
    formula_rounds=1,
    exact=False,
    density=0.1,
    imbalance=None,
)


@pytest.mark.parametrize(
    ("words", "settled"),
    [
        ([100, 100, 100], 0),
        ([200, 100, 100], 1),
        ([100, 50, 105, 90], 2),  # too few is not settled either: rows still cut off what should travel
        ([50, 111, 100], 2),
        ([100, 100, 111], None),
        ([100], 0),
    ],
)
def test_settled_means_near_the_formula_from_then_on(words: list[float], settled: int | None) -> None:
    assert settled_after([replace(STEP, words=float(count)) for count in words]) == settled


def steps_of(shares: list[float], words: float = 100.0) -> list[Step]:
    """A window of each."""
    return [replace(STEP, imbalance=share, words=words) for share in shares for _ in range(traffic.WINDOW)]


@pytest.mark.parametrize(
    ("shares", "settled"),
    [
        ([2.0, 2.0, 2.0], True),
        ([9.0, 2.0, 2.01, 1.995], True),
        ([2.0, 2.0], False),
        ([2.0, 2.0, 1.97], False),
        ([2.02, 2.01, 1.99], False),  # within 1 % of the one before each time, and on its way
    ],
)
def test_settled_partitions_stay_for_three_windows(shares: list[float], settled: bool) -> None:
    assert traffic.has_settled(steps_of(shares)) is settled


def test_settled_is_words_too_and_asked_for_at_the_end_of_a_window() -> None:
    assert not traffic.has_settled(steps_of([2.0, 2.0]) + steps_of([2.0], words=102.0))
    assert not traffic.has_settled(steps_of([2.0, 2.0, 2.0, 2.0])[1:])


def test_a_window_with_one_exact_step_more_is_as_settled() -> None:
    steps = steps_of([2.0, 2.0, 2.0])
    dear = replace(STEP, imbalance=9.0, words=5000.0)
    assert traffic.has_settled([*steps[:-1], replace(dear, exact=True)])
    assert not traffic.has_settled([*steps[:-1], dear])


def test_a_row_says_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "NEAR", 0.5)
    monkeypatch.setattr(traffic, "CAP", 200)
    assert [row("exdyna-paper", 2)[what] for what in ("ended", "steps")] == ["settled", 80]
    monkeypatch.setattr(traffic, "NEAR", 0.0)
    assert [row("exdyna-paper", 2)[what] for what in ("ended", "steps")] == ["cap", 200]
    assert [row("deft-paper", 2)[what] for what in ("ended", "steps")] == ["fixed", traffic.MOST_STEPS]
    assert row("topk", 2)["ended"] == "fixed"


def test_more_than_the_machine_holds_is_refused_before_anything_runs() -> None:
    small, large = Case("topk", 2, N, DENSITY), Case("exdyna", 65_536, 10**12, DENSITY)
    reported: list[str] = []
    with pytest.raises(ConfigError, match=r"65536 ranks.*GiB"):
        traffic.measure_all([small, large], lambda work, doing: reported.append(doing))
    assert reported == []


def test_reported_work_adds_up_and_threads_are_given_back() -> None:
    cases = [Case("topk", 2, N, DENSITY), Case("exdyna", 2, N, DENSITY)]
    work: list[float] = []
    threads = torch.get_num_threads()
    rows = traffic.measure_all(cases, lambda amount, doing: work.append(amount))
    assert sum(work) == sum(case.steps * case.work for case in cases)
    assert [found["scheme"] for found in rows] == ["topk", "exdyna"]
    assert torch.get_num_threads() == threads


def test_steps_become_fewer_where_they_are_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Case("deft", 2, 10**6, 0.01).steps == traffic.MOST_STEPS
    assert Case("deft", 1024, 10**6, 0.01).steps == traffic.FEWEST_STEPS
    monkeypatch.setattr(traffic, "CAP", 1500)
    assert Case("exdyna", 64, 10**6, 0.01).steps == 1500
    assert Case("exdyna", 1024, 10**6, 0.01).steps == 97
    assert Case("topk", 1024, 10**6, 0.01).steps == 1


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(scheme, world) for scheme in ("noop", "topk") for world in (2, 4)]
    path = tmp_path / "traffic.png"
    traffic.plot(rows, N, DENSITY, path)
    assert path.read_bytes().startswith(b"\x89PNG")
