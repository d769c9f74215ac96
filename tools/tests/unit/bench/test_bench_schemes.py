"""`bench schemes` on small vectors: every column, and schemes that are seen to do badly."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gradsieve.comm.ops import AllReduce
from gradsieve.errors import ConfigError
from gradsieve.schemes import SCHEMES, make
from gradsieve.types import Ctx, Outcome, Program, Sparse
from gradsieve_tools.bench.common import models
from gradsieve_tools.bench.common.clock import Clock
from gradsieve_tools.bench.common.models import Task
from gradsieve_tools.bench.common.recordings import WARM_STEPS, Recording
from gradsieve_tools.bench.schemes.measure import COLUMNS, Fleet, Plan, measure, measure_all, tables
from gradsieve_tools.bench.schemes.plot import plot
from gradsieve_tools.cli.main import main
from gradsieve_tools.specs import parse
from laws.toys import LosesMass, State, Toy

N, STEPS, WORLD, DENSITY = 2_000, 6, 4, 0.05
K = 100


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


def test_dense_is_the_best_there_is_at_its_price(recording: Recording) -> None:
    found = row("dense", recording)
    assert found["fidelity"] == pytest.approx(1)
    assert found["residual"] == 0
    assert found["words"] == 2 * N * 3 / 4
    assert found["times_k"] == 2 * N / K  # k is what the others were asked for
    assert found["of_target"] == N / K
    assert found["imbalance"] == 1
    assert found["rounds"] == 4


def test_top_k_by_its_formula(recording: Recording) -> None:
    found = row("topk", recording)
    assert found["words"] == 2 * K * 3
    assert found["times_k"] == pytest.approx(8)
    assert found["rounds"] == 2
    assert 1 < found["of_target"] <= WORLD
    assert found["residual"] > 0


def test_a_scheme_that_drops_mass_is_seen(recording: Recording) -> None:
    assert measure(LosesMass(), recording, WORLD, DENSITY)["lost"] > 1e-4
    assert measure(Toy(), recording, WORLD, DENSITY)["lost"] < 1e-5


def test_the_published_gtopk_drops_mass_and_ours_does_not(recording: Recording) -> None:
    assert row("gtopk:paper=true", recording)["lost"] > 1e-3
    assert row("gtopk", recording)["lost"] < 1e-5


def test_a_scheme_that_does_not_look_has_low_fidelity(recording: Recording) -> None:
    """Toy sends every third place, whatever is there."""
    blind = measure(Toy(density=0.3), recording, WORLD, 0.3)
    seeing = measure(make("topk", 0.3), recording, WORLD, 0.3)
    assert blind["of_target"] == pytest.approx(1, abs=0.2)
    assert blind["fidelity"] < 0.6 < 0.8 < seeing["fidelity"]


@dataclass(frozen=True, kw_only=True)
class Growing(Toy):
    """Sends ten elements more in every step, all of them of rank 1."""

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        picked = torch.arange(10 * (ctx.step + 1))
        mine = acc[picked] * (ctx.rank == 1)
        total = yield AllReduce(mine.clone())
        share = picked if ctx.rank == 1 else picked[:0]
        return Outcome(Sparse(picked, total, N), Sparse(share, mine[share], N), state)


def test_a_row_is_the_mean_over_the_second_half(recording: Recording) -> None:
    found = measure(Growing(), recording, WORLD, DENSITY)
    assert found["of_target"] == (40 + 50 + 60) / 3 / K
    assert found["words"] == 2 * 50 * 3 / 4
    assert found["imbalance"] == WORLD  # one of four ranks does everything


def test_residuals_wait_and_are_measured_after_the_step(recording: Recording) -> None:
    fleet = Fleet(make("topk", DENSITY), recording, WORLD, DENSITY)
    step = fleet.step()
    left = fleet.residuals.sum(0).norm() / recording.gradients[0].sum(0).norm()
    assert step.residual == pytest.approx(float(left))
    waiting = recording.gradients[:1].sum((0, 1)) - fleet.residuals.sum(0)
    assert int((waiting.abs() > 1e-6).sum()) == pytest.approx(step.of_target * K, abs=3)


def test_fewer_ranks_are_the_first_ones(recording: Recording) -> None:
    first = replace(recording, gradients=recording.gradients[:, :2].clone())
    both = [row("exdyna", which, world=2) for which in (recording, first)]
    assert {**both[0], "select_ms": 0} == {**both[1], "select_ms": 0}


def test_a_scheme_is_given_the_sizes_of_the_tensors(recording: Recording) -> None:
    reported: list[tuple[list[int], int]] = []

    class Layered(Toy):
        def init_state(self, sizes: Any, world: int) -> State:
            reported.append((sizes, world))
            return super().init_state(sizes, world)

    measure(Layered(), recording, 2, DENSITY)
    assert reported == [(recording.sizes, 2)] * 2


def test_the_clock_runs_in_the_program_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])

    def program() -> Iterator[str]:
        now[0] += 3
        yield "op"
        now[0] += 2
        return 7

    clock = Clock()
    timed = clock.program(program())  # type: ignore[arg-type]
    assert next(timed) == "op"
    now[0] += 100
    with pytest.raises(StopIteration) as end:
        timed.send(torch.zeros(1))
    assert end.value.value == 7
    assert clock.seconds == 5


def tiny() -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 1))
    return Task(model, (torch.randn(64, 30),), torch.randn(64, 1), mse_loss, batch=4, rate=0.1)


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in models.MODELS:
        monkeypatch.setitem(models.MODELS, model, tiny)


PLAN = Plan(["cnn", "recommender"], ["dense", "topk"], [2, 3], [0.1, 0.05], steps=4)


@pytest.mark.usefixtures("_tiny")
def test_all_combinations_are_measured_in_order_and_reported_work_adds_up() -> None:
    work: list[float] = []
    threads = torch.get_num_threads()
    rows = measure_all(PLAN, lambda amount, doing: work.append(amount))
    keys = [(row["model"], row["world"], row["density"], row["scheme"]) for row in rows]
    wanted = [
        (m, w, d, s) for m in PLAN.models for w in PLAN.worlds for d in PLAN.densities for s in PLAN.schemes
    ]
    assert keys == wanted
    assert sum(work) == PLAN.work()
    assert len(work) == 2 * (WARM_STEPS + 4 + 8)
    assert torch.get_num_threads() == threads
    assert {row["n"] for row in rows} == {641}


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schemes": ["topk", "noop"]}, "noop exchanges nothing"),
        ({"schemes": ["nosuch"]}, "nosuch"),
        ({"worlds": [2, 65_536], "steps": 10**9}, r"cnn's gradients of 65536 ranks need .* GiB"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(change: dict[str, Any], said: str) -> None:
    reported: list[str] = []
    with pytest.raises(ConfigError, match=said):
        measure_all(replace(PLAN, **change), lambda work, doing: reported.append(doing))
    assert reported == []


def fake(scheme: str, **values: Any) -> dict[str, Any]:
    usual = dict.fromkeys(COLUMNS, 1234.5678)
    place = {"model": "cnn", "n": 400_000, "world": 16, "density": 0.01, "lost": 1.234e-8}
    return {**usual, **place, "scheme": scheme, **values}


def test_there_is_one_table_a_block_and_it_fits_a_terminal() -> None:
    long = "spardl:teams=2+residuals=local"
    rows = [fake("topk"), fake(long), fake("topk", density=0.001), fake(long, density=0.001)]
    shown = tables(rows)
    assert shown.count("cnn, 400,000 parameters, 16 ranks, density 0.01\n") == 1
    assert shown.count("cnn, 400,000 parameters, 16 ranks, density 0.001\n") == 1
    assert shown.count(long) == 2
    assert max(map(len, shown.splitlines())) <= 120
    assert "1e-08" in shown


def test_a_picture_is_drawn_also_where_nothing_was_sent(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [fake(name, words=1e3 * (1 + at % 4), fidelity=0.5) for at, name in enumerate(TALKING)]
    rows += [fake("topk", model="transformer", of_target=0.0, fidelity=0.0)]
    path = tmp_path / "schemes.png"
    plot(rows, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_tiny")
def test_a_run_prints_tables_and_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schemes.json"
    options = ["--models", "cnn", "--world", "3,2", "--densities", "0.1", "--steps", "2", "--json", str(path)]
    chosen = ["exdyna:blocks_per_partition=8", "exdyna", "topk"]
    assert main(["bench", "schemes", "--schemes", ",".join(chosen), *options]) == 0
    out = capsys.readouterr().out
    assert "cnn, 641 parameters, 2 ranks, density 0.1" in out
    result = json.loads(path.read_text())
    ordered = ["topk", "exdyna:blocks_per_partition=8", "exdyna"]  # by the registry, then as given
    assert [row["scheme"] for row in result["rows"]] == 2 * ordered
    assert result["config"] == {
        "models": ["cnn"],
        "schemes": ordered,
        "worlds": [2, 3],
        "densities": [0.1],
        "steps": 2,
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "cnn,gpt"], "no model is called 'gpt'; there are: cnn, transformer, recommender"),
        (["--schemes", "exdyna:blocks=8"], "blocks_per_partition"),
        (["--schemes", "nosuch"], "no scheme is called 'nosuch'"),
        (["--densities", "0.1,lots"], "not numbers"),
        (["--steps", "0"], "whole number"),
        (["--world", "1"], "2 to 65,536 ranks"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "schemes", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_help_says_what_the_columns_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "schemes", "--help"])
    shown = capsys.readouterr().out
    assert [column for column in COLUMNS[1:] if f"\n  {column} " not in shown] == []


def test_all_are_all_that_exchange_something() -> None:
    from gradsieve_tools.commands.values import talking

    assert talking("all") == TALKING
    assert "noop" not in TALKING
