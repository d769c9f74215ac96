"""The model of costs and the plan: what must hold whatever the constants are."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gradsieve.comm.links import Links
from gradsieve_tools.cli.main import main
from gradsieve_tools.costs import Costs, Host, with_rings
from gradsieve_tools.plan.choose import Plan, make_plan, recommendation
from gradsieve_tools.plan.options import Model, every_option
from gradsieve_tools.plan.predict import predict
from gradsieve_tools.plan.quality import (
    BETWEEN_SITES,
    BY_RANKS,
    FP16,
    GRADIENTS_IN_FOUR_BITS,
    Gap,
    of_auto,
    of_bits,
    of_scheme,
)

ROOT = Path(__file__).parents[4]
LAPTOP = Host(memory=10e9, selection=500e6, message=20e-6)
DEVICE = Host(memory=900e9, selection=100e9, message=20e-6)
MLP = Model(25_000_000, 0.1, 0.2)


def group(rate: float, world: int = 8, latency: float = 100e-6, host: Host = LAPTOP) -> Costs:
    return Costs(world, with_rings(Links(latency, 32 / rate), world), host)


def plan(rate: float, model: Model = MLP, world: int = 8, host: Host = LAPTOP, gap: float = math.inf) -> Plan:
    return make_plan(model, group(rate, world, host=host), 0.01, gap)


def steps(costs: Costs, model: Model = MLP) -> dict[str, float]:
    options = every_option(model, costs, 0.01, lambda option: predict(option, model, costs).step)
    return {each.name.split(",")[0]: predict(each, model, costs).step for each in options}


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (group(1e9), group(100e6)),
        (group(1e9), group(1e9, latency=20e-3)),
        (group(1e9), group(1e9, host=replace(LAPTOP, memory=1e9))),
        (group(1e9), group(1e9, host=replace(LAPTOP, selection=50e6))),
    ],
    ids=["rate", "latency", "memory", "selection"],
)
def test_nothing_gets_faster_on_worse_links_or_hosts(better: Costs, worse: Costs) -> None:
    before, after = steps(better), steps(worse)
    common = before.keys() & after.keys() - {"auto"}  # which sends less where it has to
    assert len(common) > 20
    assert all(after[name] >= before[name] * 0.999 for name in common)
    assert any(after[name] > before[name] * 1.01 for name in common)


@pytest.mark.parametrize(
    ("case", "made"),
    [
        ("100 Gbit/s", lambda: plan(100e9, host=DEVICE)),
        ("NVLink", lambda: plan(3.6e12, host=DEVICE)),
        ("a tiny model", lambda: plan(1e9, Model(10_000, 0.002, 0.004))),
        ("long steps", lambda: plan(10e9, Model(25_000_000, 5.0, 10.0))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_plain_ddp_where_nothing_is_to_be_gained(case: str, made: "object") -> None:
    best: Plan = made()  # type: ignore[operator]
    assert best.plain, recommendation(best)
    assert recommendation(best).startswith("Use plain DDP")


@pytest.mark.parametrize(
    "links",
    [
        ["--rate", "100mbit", "--delay", "20ms", "--params", "2e6", "--compute", "100ms"],
        ["--rate", "20mbit", "--delay", "80ms", "--params", "6e5", "--compute", "130ms"],
        ["--rate", "50mbit", "--delay", "20ms", "--params", "1e6", "--compute", "58ms"],
        ["--rate", "100mbit", "--delay", "20ms", "--params", "10e6", "--compute", "60ms", "--device", "l40s"],
    ],
    ids=lambda words: "-".join(words[1::2]),
)
def test_between_sites_the_advice_is_that_of_the_page(
    links: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """On the networks of docs/internet.md; the twin: in one rack it is another."""
    page = (ROOT / "docs" / "internet.md").read_text()
    advice = re.search(r"gradsieve\.attach\(ddp, optimizer, (bits=0\.09, exchange=[^#]*\))\)", page)
    assert advice is not None
    main(["plan", "--world", "4", *links])
    assert f"Use 0.09 bits, every 3 steps: gradsieve.attach(ddp, optimizer, {advice[1]})" in " ".join(
        capsys.readouterr().out.split()
    )
    main(["plan", "--world", "4", *links[:2], *links[4:]])
    assert "Use 0.09 bits" not in capsys.readouterr().out


MEASURED = {4: "ranks-4-2000-2026-11-19", 16: "ranks-16-2026-11-19", 64: "ranks-64-2026-11-19"}


@pytest.mark.parametrize("ranks", BY_RANKS)
def test_gaps_by_ranks_are_those_of_the_files(ranks: int) -> None:
    file = ROOT / "benchmarks" / "results" / f"accuracy-{MEASURED[ranks]}.json"
    rows = [row for row in json.loads(file.read_text())["rows"] if row["sync"] == "stripes"]
    found = {row["budget"]: (row["gap"], row["seeds"]) for row in rows if row["world"] == ranks}
    assert found.keys() == BY_RANKS[ranks].keys()
    for bits, (gap, seeds) in BY_RANKS[ranks].items():
        assert found[bits] == (pytest.approx(gap, abs=0.06), seeds)


def test_the_gap_of_gradients_is_that_of_its_file() -> None:
    file = ROOT / "benchmarks" / "results" / "accuracy-gradients-16-2026-11-18.json"
    [row] = [row for row in json.loads(file.read_text())["rows"] if row["sync"] != "dense"]
    assert (row["world"], row["seeds"], row["treatment"]) == (16, 3, "gradients")
    assert pytest.approx(row["gap"], abs=0.01) == GRADIENTS_IN_FOUR_BITS.above


@pytest.mark.parametrize(
    ("file", "sync", "gap"),
    [
        ("100mbit-20ms-2026-11-17", "stripes:density=0.0941+values=sign", of_bits(0.15, 4)),
        ("100mbit-20ms-2026-11-17", "stripes:density=0.4706+values=sign", of_bits(0.75, 4)),
        (
            "100mbit-20ms-2026-11-17",
            "stripes:density=0.17+values=sign@steps:every=3+overlap=3",
            BETWEEN_SITES,
        ),
        ("100mbit-2026-11-15", "auto", of_auto(0.157, 4)),
        ("100mbit-2026-11-15", "exdyna", of_scheme("exdyna", 0.01, exact=True)),
        ("100mbit-2026-11-15", "fp16", FP16),
        (
            "gradients-1gbit-2026-11-18",
            "stripes:density=1+values=int4@gradients",
            GRADIENTS_IN_FOUR_BITS,
        ),
    ],
)
def test_steps_to_denses_loss_are_those_of_their_files(file: str, sync: str, gap: Gap) -> None:
    path = ROOT / "benchmarks" / "results" / f"time-to-accuracy-transformer-{file}.json"
    steps = {row["sync"]: row["steps"] for row in json.loads(path.read_text())["rows"]}
    assert gap.steps == pytest.approx(steps[sync] / steps["dense"])


LINKS = ["--world", "8", "--rate", "100mbit", "--delay", "5ms"]
BY_HAND = ["plan", *LINKS, "--params", "25e6", "--compute", "300ms"]


def test_from_figures_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    assert main([*BY_HAND, "--price", "0.1", "--json", str(out), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "RECOMMENDED" in printed
    assert "the limit" in printed
    saved = json.loads(out.read_text())
    assert saved["config"]["recommended"] in printed
    assert saved["config"]["plain_ddp"] is False
    assert all(row["money_a_day"] == pytest.approx(0.1 * row["gb_a_day"], abs=0.01) for row in saved["rows"])
    assert picture.stat().st_size > 10_000
