"""`bench time-to-accuracy` without its network: the rule, the batches, the summary, wrong arguments."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice, pairwise
from pathlib import Path

import pytest
import torch

from gradsieve.bench import rivals, time_to_accuracy, time_to_accuracy_worker
from gradsieve.bench.time_to_accuracy import Curve, Plan, Run, summary
from gradsieve.bench.time_to_accuracy_plot import plot
from gradsieve.bench.time_to_accuracy_worker import batches
from gradsieve.cli.main import main
from gradsieve.errors import ConfigError
from gradsieve.lab import Lab

PLAN = Plan(4, "1gbit", None, 20_000, 0.01, ["dense", "exdyna"], steps=600, seeds=1)


@pytest.fixture(autouse=True)
def no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not refused in time fails here, rather than after minutes of training."""
    monkeypatch.setattr(Lab, "__enter__", lambda _: pytest.fail("a lab was opened"))


def curve(*accuracy: float, step_seconds: float = 1.0) -> Curve:
    places = range(1, len(accuracy) + 1)
    return Curve(
        [10 * place for place in places], [10 * step_seconds * place for place in places], [*accuracy]
    )


# -- the rule -------------------------------------------------------------------------------------------


def test_an_evaluation_counts_with_the_two_before_it() -> None:
    assert curve(0.1, 0.2, 0.6, 0.7).smoothed == [0.3, 0.5]


@pytest.mark.parametrize(
    ("accuracy", "place"),
    [
        ((0.5, 0.6, 0.7, 0.8, 0.9), 4),  # 0.8 is reached at the very end
        ((0.5, 0.6, 0.7, 0.8, 0.89), None),  # and here almost
        ((0.5, 0.99, 0.5, 0.5), None),  # one lucky evaluation is not enough
        ((0.8, 0.8, 0.8, 0.1, 0.9), 2),  # the first time counts, whatever follows
        ((0.9, 0.9), None),  # two evaluations have no smoothed accuracy yet
        ((), None),
    ],
)
def test_the_target_is_reached_when_the_mean_of_three_first_is_not_below_it(
    accuracy: tuple[float, ...], place: int | None
) -> None:
    assert curve(*accuracy).crossing(0.8) == place


def test_the_same_right_answers_in_another_order_are_the_same_accuracy() -> None:
    assert sum([0.1, 0.2, 0.3]) != sum([0.3, 0.2, 0.1])
    target = curve(0.1, 0.2, 0.3).smoothed[-1]
    assert curve(0.3, 0.2, 0.1).crossing(target) == 2


def test_evaluations_are_even_and_one_ends_the_budget() -> None:
    dense, other = PLAN.evaluations("dense"), PLAN.evaluations("exdyna")
    assert dense == [20 * place for place in range(1, 31)]
    assert other[:30] == dense
    assert other[-1] == 1200
    uneven = replace(PLAN, steps=100).evaluations("dense")
    assert (len(uneven), uneven[-1]) == (30, 100)
    assert {after - before for before, after in pairwise(uneven)} == {3, 4}
    assert replace(PLAN, steps=4).evaluations("exdyna") == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("params", [807, 20_000, 1_000_000, 6_000_000])
def test_no_other_width_comes_closer_to_the_size_asked_for(params: int) -> None:
    def distance(width: int) -> int:
        made = 784 * width + width + width * width + width + 10 * width + 10
        return abs(made - params)

    width = replace(PLAN, params=params).width
    assert width >= 1
    assert distance(width) <= min(distance(width - 1), distance(width + 1))


# -- batches --------------------------------------------------------------------------------------------


def seen(seed: int, rank: int, count: int) -> list[list[int]]:
    """The labels of this rank's batches; every image has one of its own."""
    labels = torch.arange(50)
    return [own.tolist() for _, own in islice(batches((labels.view(-1, 1), labels), 4, seed, rank, 3), count)]


def test_ranks_share_an_epoch_and_see_it_in_the_order_of_the_seed() -> None:
    epoch = [seen(7, rank, 4) for rank in range(3)]
    assert len(set(chain(*chain(*epoch)))) == 48  # 3 ranks, 4 batches, no image twice; two are left out
    assert seen(7, 1, 12) == seen(7, 1, 12)
    assert seen(7, 1, 4) != seen(8, 1, 4)
    assert seen(7, 1, 8)[:4] != seen(7, 1, 8)[4:]  # the next epoch has an order of its own


# -- summary --------------------------------------------------------------------------------------------


def run(sync: str, seed: int, step_seconds: float, *accuracy: float) -> Run:
    return Run(sync, seed, 0.8, curve(*accuracy, step_seconds=step_seconds), bytes_sent=400)


RUNS = [
    run("dense", 0, 2.0, 0.7, 0.7, 0.8, 0.9),
    run("exdyna", 0, 1.0, 0.7, 0.8, 0.9),
    run("topk", 0, 1.0, 0.8, 0.8, 0.8),
    run("dense", 1, 3.0, 0.7, 0.7, 0.8, 0.9),
    run("exdyna", 1, 0.5, 0.7, 0.7, 0.8, 0.9),
    run("topk", 1, 1.0, 0.7, 0.7, 0.7, 0.7),
]


def test_a_row_holds_means_over_seeds_against_dense_of_the_same_seed() -> None:
    dense, exdyna, _ = summary(RUNS)
    assert (dense["seconds"], dense["steps"], dense["times_dense"], dense["spread"]) == (100, 40, 1, 0)
    assert (exdyna["seconds"], exdyna["steps"]) == (25, 35)
    assert exdyna["times_dense"] == pytest.approx((80 / 30 + 120 / 20) / 2)
    assert exdyna["spread"] == pytest.approx((120 / 20 - 80 / 30) / 2**0.5)
    assert exdyna["step_ms"] == 750
    assert exdyna["bytes_sent"] == pytest.approx((400 / 30 + 400 / 40) / 2)
    assert [each["seconds"] for each in exdyna["runs"]] == [30, 20]
    assert exdyna["runs"][0]["curve"]["accuracy"] == [0.7, 0.8, 0.9]


def test_a_seed_that_never_got_there_leaves_no_mean_to_boast_of() -> None:
    third = [run(sync, 2, 1.0, 0.8, 0.8, 0.8) for sync in ("dense", "topk")]
    topk = summary([*RUNS, *third])[2]
    assert topk["reached"] == "2 of 3"
    assert [topk[name] for name in ("seconds", "steps", "times_dense", "spread")] == [None] * 4
    assert topk["accuracy"] == pytest.approx((0.8 + 0.7 + 0.8) / 3)


def test_one_seed_has_no_spread() -> None:
    assert [row["spread"] for row in summary(RUNS[:3])] == [None] * 3


def test_the_picture_shows_runs_that_reached_the_target_and_runs_that_did_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.png"
    plot(PLAN, RUNS, path)
    assert path.read_bytes().startswith(b"\x89PNG")


# -- arguments ------------------------------------------------------------------------------------------


def test_dense_comes_first_whatever_is_asked_for() -> None:
    assert rivals.syncs_of("exdyna,fp16,dense,exdyna", always=["dense"]) == ["dense", "exdyna", "fp16"]
    with pytest.raises(ConfigError, match="first sync"):
        replace(PLAN, syncs=["exdyna", "dense"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--syncs", "exdyna,nosuch"], "no sync is called nosuch"),
        (["--density", "0"], "density must be above 0"),
        (["--steps", "2"], "raise --steps"),
        (["--params", "806"], "raise --params"),
        (["--hosts", "65"], "1 to 64"),
        (["--rate", "fast"], "rate 'fast'"),
        (["--json", "/no/such/folder/x.json"], "/no/such/folder"),
        (["--plot", "/no/such/folder/x.png"], "/no/such/folder"),
    ],
)
def test_a_setting_that_cannot_work_ends_with_2_and_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "time-to-accuracy", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("gradsieve: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--hosts", "--params", "--steps", "--seeds"])
def test_a_number_that_is_none_is_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "time-to-accuracy", option, "0"])
    assert ended.value.code == 2
    assert option in capsys.readouterr().err


def test_missing_images_are_said_once_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(time_to_accuracy, "FASHION_MNIST", tmp_path)
    assert main(["bench", "time-to-accuracy"]) == 2
    assert capsys.readouterr().err.count("apt-get install dataset-fashion-mnist") == 1


def test_the_time_left_is_that_of_one_sync_and_not_of_all_at_its_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, told = [100.0], list[str]()
    monkeypatch.setattr(time_to_accuracy_worker.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time_to_accuracy_worker, "tell", told.append)
    progress = time_to_accuracy_worker.Progress(600)
    for step in (20, 40):
        now[0] += 200.0
        progress.note(step, False, f"dense: step {step}")
    now[0] += 1.0
    progress.note(60, False, "too soon for a line")
    progress.note(80, True, "exdyna: step 80")
    assert told == [
        "dense: step 20; at most about 5800 s left with this sync",
        "dense: step 40; at most about 5600 s left with this sync",
        "exdyna: step 80; at most about 0 s left with this sync",
    ]
