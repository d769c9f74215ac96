"""`gradsieve bench bits`: what an exchange tells, what it costs, and where the bound lies."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsieve.errors import ConfigError
from gradsieve.schemes import SCHEMES
from gradsieve.types import Sparse
from gradsieve.wire.values import VALUE_CODECS
from gradsieve_tools.bench.bits import measure as bits
from gradsieve_tools.bench.bits import plot as bits_plot
from gradsieve_tools.bench.bits.measure import Plan, Waiting
from gradsieve_tools.cli.main import main
from gradsieve_tools.specs import parse
from tiny_task import TASK, tiny

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


def test_an_update_of_nothing_or_of_zeros_tells_nothing() -> None:
    mean = torch.randn(10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    nowhere = Sparse(torch.zeros(0, dtype=torch.int64), torch.zeros(0), 10)
    assert bits.share_known(mean, nowhere, WORLD) == 0.0
    assert bits.share_known(mean, Sparse.full(torch.zeros(10)), WORLD) == 0.0


def test_known_is_what_is_no_longer_missing() -> None:
    mean = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    assert bits.share_known(mean, Sparse.run(1, torch.tensor([8.0]), 3), world=2) == pytest.approx(16 / 25)
    assert bits.share_known(mean, Sparse.run(0, torch.tensor([5.0, 8.0]), 3), world=2) == pytest.approx(
        1 - 0.25 / 25
    )
    too_much = Sparse.run(0, torch.tensor([18.0]), 3)
    assert bits.share_known(mean, too_much, world=2) == pytest.approx(1 - (36 + 16) / 25)
    assert bits.share_known(torch.zeros(3, dtype=torch.float64), Sparse.full(torch.zeros(3)), world=2) == 1.0


def test_signs_of_ranks_that_agree_tell_two_over_pi_of_a_gaussian() -> None:
    """Their sum has one magnitude in a block, so that rounding it once more changes nothing."""
    found = bits.measure(parse("stripes:values=sign", 1.0), gaussian(alike=True))
    assert found["known"] == pytest.approx(2 / math.pi, abs=0.015)
    apart = bits.measure(parse("stripes:values=sign", 1.0), gaussian())
    assert 0.3 < apart["known"] < found["known"]
    assert apart["bits"] == found["bits"] == pytest.approx(1.5 * (1 + 16 / 256), rel=0.02)


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


def test_a_heavy_tail_is_where_the_bound_ends() -> None:
    heavy = gaussian(alike=True)
    heavy = replace(heavy, vectors=heavy.vectors**5)
    found = bits.measure(parse("exdyna:values=int4", 0.03), heavy)
    assert found["known"] > found["bound"]


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


def test_schemes_that_remember_have_settled_before_they_are_measured() -> None:
    """The threshold of the first exchange is exact: what is measured is one that was followed."""
    waiting = gaussian(3)
    bench = bits.Bench(parse("exdyna", 0.05), waiting)
    pairs = [bench.exchange(vectors) for _ in range(2) for vectors in waiting.vectors]
    assert bits.measure(parse("exdyna", 0.05), waiting)["bits"] == pytest.approx(
        sum(cost for _, cost in pairs[3:]) / 3
    )
    assert bench.steps == 6


def test_cases_are_every_way_to_send_values_but_none_twice() -> None:
    plan = Plan([TASK], ["topk", "exdyna", "stripes", "cltk:values=int8"], ["exact", "sign"], [0.1, 1.0])
    keys = [(case.name, case.values, case.scheme.density) for case in plan.cases()]
    assert keys == [
        ("topk", "exact", 0.1),
        ("topk", "exact", 1.0),
        ("exdyna", "exact", 0.1),
        ("exdyna", "sign", 0.1),
        ("exdyna", "exact", 1.0),  # density 1 is the dense exchange, however values would travel
        ("stripes", "exact", 0.1),
        ("stripes", "sign", 0.1),
        ("stripes", "exact", 1.0),
        ("stripes", "sign", 1.0),  # but not for stripes
        ("cltk:values=int8", "int8", 0.1),
        ("cltk:values=int8", "int8", 1.0),
    ]


@pytest.mark.parametrize("name", ["noop", "dense"])
def test_what_has_no_line_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} sends nothing or everything"):
        bits.measure_all(Plan(["cnn"], [name], ["exact"], [0.1]), lambda work, doing: None)


@pytest.mark.usefixtures("tiny")
def test_snapshots_are_what_waits_before_an_exchange() -> None:
    plan = Plan([TASK], ["topk"], ["exact"], [0.1], steps=1, snapshots=3, every=2)
    seen: list[int] = []
    waiting = bits.record(TASK, plan, seen.append)
    assert seen == [1, 2, 3, 4, 5]
    assert waiting.vectors.shape == (3, WORLD, 40 * 64 + 64 + 64 * 3 + 3)
    assert sum(waiting.sizes) == waiting.n
    assert not waiting.vectors[0].any()  # no step was taken yet
    assert all(vector.any() for vector in waiting.vectors[1:].flatten(0, 1))


@pytest.mark.usefixtures("tiny")
def test_reported_work_adds_up_and_rows_are_sorted_by_bits() -> None:
    plan = Plan([TASK], LOSSY, list(VALUE_CODECS), [0.01, 0.3], steps=4, snapshots=2)  # type: ignore[arg-type]
    work: list[float] = []
    rows = bits.measure_all(plan, lambda amount, doing: work.append(amount))
    assert sum(work) == pytest.approx(plan.work())
    assert len(rows) == len(plan.cases())
    assert [row["bits"] for row in rows] == sorted(row["bits"] for row in rows)
    assert {row["scheme"] for row in rows} == set(LOSSY)
    assert all(math.isfinite(row["known"]) and row["known"] <= 1 + 1e-6 for row in rows)


@pytest.mark.usefixtures("tiny")
def test_a_run_prints_a_table_and_writes_rows_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    json_file, picture = tmp_path / "bits.json", tmp_path / "bits.png"
    chosen = ["--tasks", TASK, "--schemes", "topk,stripes,exdyna,gtopk", "--values", "sign,exact"]
    small = ["--densities", "0.1,1", "--steps", "3", "--snapshots", "2", "--world", "2"]
    assert main(["bench", "bits", *chosen, *small, "--json", str(json_file), "--plot", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == bits.COLUMNS
    result = json.loads(json_file.read_text())
    assert len(result["rows"]) == 2 + 4 + 3 + 2
    assert result["config"]["every"] == 7
    assert picture.read_bytes().startswith(b"\x89PNG")


def row(scheme: str, values: str, **others: Any) -> dict[str, Any]:
    usual = {"task": "cnn", "density": 0.1, "bits": 1.0, "known": 0.5, "bound": 0.6}
    return {**usual, "scheme": scheme, "values": values, **others}


def test_no_two_lines_look_alike_and_other_schemes_have_one_each() -> None:
    pytest.importorskip("matplotlib")
    rows = [row(name, values) for name in LOSSY for values in VALUE_CODECS]
    families = bits_plot.families_of(rows)
    assert len(families) == 3 * len(VALUE_CODECS) + len(LOSSY) - 3
    assert ("deft", "exact") in families
    assert ("deft", "sign") not in families
    drawn = [look for (name, _), look in bits_plot.looks(families) if name != "topk"]
    assert len({str(look) for look in drawn}) == len(drawn)
    shaded = [str(look["color"]) for look in drawn if look["zorder"] == 3]
    assert len(set(shaded)) == len(shaded) == 2 * len(VALUE_CODECS)


def test_a_line_goes_by_density_and_not_below_nothing() -> None:
    rows = [row("topk", "exact", bits=5.0, density=1.0), row("topk", "exact", bits=2.0, known=-1.0)]
    rows += [row("topk", "exact", bits=0.0), row("gtopk", "exact")]
    assert bits_plot.line_of(rows, ("topk", "exact")) == [(2.0, 0.0), (5.0, 0.5)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", "gpt"], "no task is called 'gpt'"),
        (["--values", "int3"], "values do not travel as 'int3'; there are: exact"),
        (["--schemes", "nosuch"], "no scheme is called 'nosuch'"),
        (["--snapshots", "0"], "whole number"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "bits", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_one_number_of_ranks_is_measured_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "bits", "--world", "2,4"]) == 2
    assert "--world is one number" in capsys.readouterr().err


def test_help_says_what_the_columns_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "bits", "--help"])
    shown = capsys.readouterr().out
    assert [column for column in bits.COLUMNS[2:] if f"\n  {column} " not in shown] == []
