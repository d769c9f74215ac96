"""`bench time-to-accuracy` without its network: the rule, the summary, wrong arguments."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gradsieve.errors import ConfigError, GradsieveError
from gradsieve_tools.bench.common.models import sources
from gradsieve_tools.bench.tasks import sized as sized_tasks
from gradsieve_tools.bench.tasks.data import fashion_mnist
from gradsieve_tools.bench.tasks.training import BETTER, Metric
from gradsieve_tools.bench.time_to_accuracy import measure as time_to_accuracy
from gradsieve_tools.bench.time_to_accuracy import worker as time_to_accuracy_worker
from gradsieve_tools.bench.time_to_accuracy.measure import Curve, Plan, Run, summary
from gradsieve_tools.bench.time_to_accuracy.plot import plot
from gradsieve_tools.cli.main import main
from gradsieve_tools.emulation import Lab

PLAN = Plan(4, "1gbit", None, "mlp", 20_000, 0.01, ["dense", "exdyna"], steps=600, seeds=1)
METRICS: tuple[Metric, ...] = ("accuracy", "loss")


@pytest.fixture(autouse=True)
def no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not refused in time fails here, rather than after minutes of training."""
    monkeypatch.setattr(Lab, "__enter__", lambda _: pytest.fail("a lab was opened"))


def curve(*values: float, step_seconds: float = 1.0, metric: Metric = "accuracy") -> Curve:
    places = range(1, len(values) + 1)
    return Curve(
        metric, [10 * place for place in places], [10 * step_seconds * place for place in places], [*values]
    )


def mirrored(metric: Metric, *values: float) -> list[float]:
    """Accuracies as they are; as losses, what is as far above 0.8 as an accuracy is below it."""
    return [0.8 + BETTER[metric] * (value - 0.8) for value in values]


# -- the rule -------------------------------------------------------------------------------------------


def test_an_evaluation_counts_with_the_two_before_it() -> None:
    assert curve(0.1, 0.2, 0.6, 0.7).smoothed == [0.3, 0.5]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("values", "place"),
    [
        ((0.5, 0.6, 0.7, 0.8, 0.9), 4),  # 0.8 is reached at the very end
        ((0.5, 0.6, 0.7, 0.8, 0.89), None),  # and here almost
        ((0.5, 0.99, 0.5, 0.5), None),  # one lucky evaluation is not enough
        ((0.8, 0.8, 0.8, 0.1, 0.9), 2),  # the first time counts, whatever follows
        ((0.9, 0.9), None),  # two evaluations have no smoothed value yet
        ((), None),
        ((0.5, 0.6, math.nan, 0.9, 0.9), None),  # what diverged is not there, whatever it did before
    ],
)
def test_the_target_is_reached_when_the_mean_of_three_first_is_not_worse(
    values: tuple[float, ...], place: int | None, metric: Metric
) -> None:
    assert curve(*mirrored(metric, *values), metric=metric).crossing(0.8) == place


def test_a_loss_above_the_target_is_not_there_and_an_accuracy_is() -> None:
    above = (0.9, 0.9, 0.9)
    assert [curve(*above, metric=metric).crossing(0.8) for metric in METRICS] == [2, None]


def test_the_same_right_answers_in_another_order_are_the_same_accuracy() -> None:
    assert (0.1 + 0.2) + 0.3 != (0.3 + 0.2) + 0.1
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


# -- summary --------------------------------------------------------------------------------------------


def run(sync: str, seed: int, step_seconds: float, *values: float, metric: Metric = "accuracy") -> Run:
    shown = curve(*mirrored(metric, *values), step_seconds=step_seconds, metric=metric)
    return Run(sync, seed, 0.8, shown, bytes_sent=400, parameters=50)


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
    assert exdyna["bits"] == pytest.approx(8 * exdyna["bytes_sent"] / 50)
    assert [each["seconds"] for each in exdyna["runs"]] == [30, 20]
    assert exdyna["runs"][0]["curve"]["values"] == [0.7, 0.8, 0.9]


def test_a_seed_that_never_got_there_leaves_no_mean_to_boast_of() -> None:
    third = [run(sync, 2, 1.0, 0.8, 0.8, 0.8) for sync in ("dense", "topk")]
    topk = summary([*RUNS, *third])[2]
    assert topk["reached"] == "2 of 3"
    assert [topk[name] for name in ("seconds", "steps", "times_dense", "spread")] == [None] * 4
    assert topk["final"] == pytest.approx((0.8 + 0.7 + 0.8) / 3)


def test_a_run_that_diverged_is_written_as_one() -> None:
    (row,) = summary([run("dense", 0, 1.0, 0.7, 0.8, math.nan, math.inf)])
    assert (row["final"], row["reached"]) == (None, "0 of 1")
    written = json.loads(json.dumps(row, allow_nan=False))
    assert written["runs"][0]["curve"]["values"] == [0.7, 0.8, None, None]


def test_without_a_target_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    diverged = asdict(replace(RUNS[0], target=math.nan))
    monkeypatch.setattr(time_to_accuracy, "rows_from_hosts", lambda *_: [diverged])
    with pytest.raises(GradsieveError, match="dense diverged"):
        time_to_accuracy.measure(replace(PLAN, task="transformer"))


def test_a_result_names_what_follows_from_the_plan() -> None:
    facts = replace(PLAN, task="transformer", params=1_000_000).facts()
    model = sized_tasks.TASKS["transformer"]
    assert facts["learning_rate"] == model.rate(facts["width"])
    assert (facts["optimizer"], facts["batch"], facts["params"]) == ("adamw", model.batch, 1_000_000)


def test_one_seed_has_no_spread() -> None:
    assert [row["spread"] for row in summary(RUNS[:3])] == [None] * 3


@pytest.mark.parametrize(("task", "metric"), [("mlp", "accuracy"), ("transformer", "loss")])
def test_the_picture_shows_runs_that_reached_the_target_and_runs_that_did_not(
    task: str, metric: Metric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn: list[Any] = []
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda own, *a, **k: [drawn.append(own), save(own, *a, **k)])
    path = tmp_path / "curves.png"
    runs = [
        run("dense", 0, 2.0, 0.1, 0.1, 0.1, 0.7, 0.7, 0.8, 0.9, metric=metric),
        run("topk", 0, 1.0, 0.1, 0.7, 0.7, 0.7, math.nan, metric=metric),
    ]
    plot(replace(PLAN, task=task), runs, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    low, high = axes.get_ylim()
    assert low < 0.8 < high
    away = {"accuracy": 0.8 - low, "loss": high - 0.8}
    assert away[metric] == pytest.approx(0.12), "the way to the target is on the side that is worse"
    assert axes.get_xlim()[0] == pytest.approx(0.9 * 40), "topk is the first that is near the target"


# -- arguments ------------------------------------------------------------------------------------------


def test_dense_comes_first() -> None:
    with pytest.raises(ConfigError, match="first sync"):
        replace(PLAN, syncs=["exdyna", "dense"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--syncs", "exdyna,nosuch"], "no sync is called nosuch"),
        (["--density", "0"], "density must be above 0"),
        (["--steps", "2"], "raise --steps"),
        (["--syncs", "stripes:values=int3"], "int3"),
        (["--params", "806"], "raise --params"),
        (["--task", "transformer", "--params", "3e3"], "raise --params"),
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


@pytest.mark.parametrize("option", ["--hosts", "--params", "--steps", "--seeds", "--task"])
def test_a_value_that_is_none_is_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "time-to-accuracy", option, "0"])
    assert ended.value.code == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "data", "said"),
    [
        ("mlp", fashion_mnist, "apt-get install dataset-fashion-mnist"),
        ("transformer", lambda folder: sources(1000, folder), "no source files"),
    ],
)
def test_missing_data_is_said_once_before_anything_starts(
    task: str,
    data: Any,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    known = sized_tasks.TASKS[task]
    without = replace(known, recipe=replace(known.recipe, data=lambda: data(tmp_path)))
    monkeypatch.setitem(sized_tasks.TASKS, task, without)
    assert main(["bench", "time-to-accuracy", "--task", task]) == 2
    assert capsys.readouterr().err.count(said) == 1


def test_the_time_left_is_that_of_one_sync_and_not_of_all_at_its_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, reported = [100.0], list[str]()
    monkeypatch.setattr(time_to_accuracy_worker.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time_to_accuracy_worker, "tell", reported.append)
    progress = time_to_accuracy_worker.Progress(600)
    for step in (20, 40):
        now[0] += 200.0
        progress.note(step, False, f"dense: step {step}")
    now[0] += 1.0
    progress.note(60, False, "too soon for a line")
    progress.note(80, True, "exdyna: step 80")
    assert reported == [
        "dense: step 20; at most about 5800 s left with this sync",
        "dense: step 40; at most about 5600 s left with this sync",
        "exdyna: step 80; at most about 0 s left with this sync",
    ]
