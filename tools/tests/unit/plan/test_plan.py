"""The model of costs and the plan: what must hold whatever the constants are."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import gradsieve
from gradsieve.comm.links import Links
from gradsieve_tools.cli.main import main
from gradsieve_tools.costs import LAUNCHES, Cost, Costs, Host, dense_seconds, with_rings
from gradsieve_tools.devices import DEVICES
from gradsieve_tools.link_costs import seconds_a_bit
from gradsieve_tools.plan import choose
from gradsieve_tools.plan.choose import Plan, make_plan, recommendation
from gradsieve_tools.plan.options import Model, automatic, between_sites, dense, every_option, with_budget
from gradsieve_tools.plan.predict import costs_of, predict
from gradsieve_tools.plan.quality import (
    BETWEEN_SITES,
    BY_RANKS,
    FP16,
    GRADIENTS_IN_FOUR_BITS,
    Gap,
    measured_with,
    of_auto,
    of_bits,
    of_scheme,
)
from gradsieve_tools.profiles import ModelProfile, Profile, by_hand, write_profile

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


def test_no_step_is_shorter_than_computing() -> None:
    assert min(steps(group(100e9)).values()) >= MLP.compute


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


def test_something_sparse_on_slow_links() -> None:
    slow = plan(100e6)
    assert not slow.plain
    assert slow.best.step < 0.1 * slow.dense.step
    assert "gradsieve.attach(" in recommendation(slow)
    assert "loss is above dense's" in recommendation(slow)


def test_without_a_margin_dense_would_lose_to_a_hair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the one above it: the policy decides, not the figures."""
    assert plan(100e9, host=DEVICE).plain
    monkeypatch.setattr(choose, "MARGIN", 0.0)
    assert not plan(100e9, host=DEVICE).plain


def test_what_was_not_measured_is_never_recommended() -> None:
    slow = plan(20e6, gap=5.0)
    quickest = min(slow.ranked, key=lambda each: each.step).option
    assert quickest.gap.above is None or quickest.gap.above > 5.0
    assert slow.best.option.gap.above is not None
    assert slow.best.option.gap.above <= 5.0


def test_what_counts_is_the_time_to_denses_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quicker step that needs more steps is no gain; the twin: with as many steps it is."""
    made = plan(100e6)
    assert [each.to_loss for each in made.ranked if each.to_loss] == sorted(
        each.to_loss for each in made.ranked if each.to_loss
    )
    needing = replace(made.best.option.gap, steps=100.0)
    slow = [
        replace(each, option=replace(each.option, gap=needing))
        if each.option.name.startswith(("stripes", "auto", "0.09", "exdyna 0", "gradients"))
        else each
        for each in made.ranked
    ]
    assert choose.choose(slow, math.inf).option.name == "fp16 or bf16 hook"
    assert choose.choose(made.ranked, math.inf).option.name.startswith("stripes")


def test_an_exchange_hides_behind_as_many_steps_as_it_may() -> None:
    costs = group(100e6, world=4, latency=40e-3)
    model = Model(2_000_000, 0.03, 0.07)
    sites = between_sites(model, costs)
    link, computed = sites.price(costs).link, sites.price(costs).computed
    assert model.compute < link < 3 * model.compute
    assert predict(sites, model, costs).step == pytest.approx(model.compute + computed / 3)
    waits = predict(replace(sites, overlap=1), model, costs).step
    assert waits == pytest.approx((2 * model.compute + model.forward + link + computed) / 3)


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


def test_from_a_profile_of_two_sites_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    measured = ROOT / "benchmarks" / "runs" / "plan" / "4-hosts-two-sites-2000000.toml"
    main(["plan", "--profile", str(measured), "--params", "2e6", "--compute", "100ms"])
    assert "Use 0.09 bits, every 3 steps" in capsys.readouterr().out


def test_a_budget_lengthens_its_period_where_rounds_outlast_a_step() -> None:
    model = Model(2_000_000, 0.03, 0.07)
    near, far = (automatic(model, group(100e6, world=4, latency=latency), 1) for latency in (1e-3, 100e-3))
    assert (near.every, near.overlap) == (1, 1)
    assert far.every == far.overlap > 1
    assert far.gap.above is None


def test_of_link_is_that_of_bench_step() -> None:
    """Bits of a step over what the link carries in a step without communication; dense has more than that."""
    model, costs = MLP, group(100e6, world=4)
    found = predict(with_budget(model, costs, 0.75), model, costs)
    assert found.of_link == pytest.approx(found.bits * model.parameters / (100e6 * model.compute))
    assert found.of_link == pytest.approx(0.75 * 25e6 / 30e6, rel=0.01)
    assert predict(dense(model), model, costs).of_link > 1


def test_a_device_is_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --world 4 --rate 1gbit --params 30.85e6 --compute 27ms"
    steps = {}
    for device in ("l40s", "cpu"):
        main([*words.split(), "--device", device, "--all"])
        printed = capsys.readouterr().out
        row = next(line for line in printed.splitlines() if line.startswith("stripes, 0.75 bits"))
        steps[device] = float(re.split(r"\s{2,}", row)[2].replace(",", ""))
        assert ("never measured on a GPU" in printed) == (device == "l40s")
        assert not printed.startswith("Assumed")
    assert steps["l40s"] < 50 < 100 < steps["cpu"]
    main(words.split())
    assert capsys.readouterr().out.startswith(
        "Assumed, without --device and --profile: ranks compute on a CPU"
    )


def test_every_device_has_a_source_and_computes_faster_than_a_cpu() -> None:
    for name, device in DEVICES.items():
        assert device.source, name
        assert name == "cpu" or (device.memory > 10 * DEVICES["cpu"].memory and device.launch > 0), name


def test_nccls_sums_stall_on_slow_links_and_gloos_do_not() -> None:
    on_device = replace(LAPTOP, launch=20e-6)
    for rate, slower in ((50e6, 1.29), (1e9, 1.0145)):
        nccl, gloo = (group(rate, host=host).around.word for host in (on_device, LAPTOP))
        assert nccl == pytest.approx(slower * gloo)


def test_launches_hide_behind_what_an_accelerator_computes() -> None:
    slow_to_launch = replace(DEVICE, launch=1e-3)
    unit = slow_to_launch.unit
    assert unit.link == pytest.approx(LAUNCHES * 1e-3)
    assert unit.computed == 0
    assert LAPTOP.unit.link == 0 < LAPTOP.unit.computed


@pytest.mark.parametrize(
    ("rate", "hidden", "bare", "then"),
    [
        (1e9, 41.0, 27.8, "stripes, 0.75 bits"),
        (10e9, 4.84, 3.58, "stripes, 0.75 bits"),
        (25e9, 2.22, 1.84, "gradients, 8 bits"),
    ],
)
def test_what_it_is_worth_that_launches_hide(
    rate: float, hidden: float, bare: float, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of docs/plan.md: nobody has measured whether they do."""

    def sooner() -> tuple[float, str]:
        costs = costs_of(by_hand("l40s", 4, rate, 1e-4))
        costs = replace(costs, host=replace(costs.host, carried=0.0))
        made = make_plan(Model(30_850_000, 0.009, 0.018), costs, 0.01, math.inf)
        return made.dense.step / (made.best.to_loss or math.inf), made.best.option.name

    assert sooner()[0] == pytest.approx(hidden, rel=0.01)
    monkeypatch.setattr(Host, "unit", property(lambda host: Cost(computed=LAUNCHES * host.launch)))
    assert sooner() == (pytest.approx(bare, rel=0.01), then)


@pytest.mark.parametrize("links", ["1gbit", "20mbit", "400gbit"])
@pytest.mark.parametrize(
    "more", [[], ["--price", "0.09"], ["--device", "h100"], ["--delay", "80ms"]], ids=str
)
def test_six_rows_fit_a_terminal(links: str, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--world", "16", "--rate", links, "--params", "7e9", "--compute", "900ms", *more]
    main(words)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100, max(lines, key=len)
    start = next(place for place, line in enumerate(lines) if line.startswith("----"))
    rows = lines[start + 1 : lines.index("", start) - 1]
    assert len(rows) == 6
    assert sum("RECOMMENDED" in row for row in rows) == 1
    assert any(row.startswith("dense (plain DDP)") for row in rows)
    main([*words, "--all"])
    assert max(map(len, capsys.readouterr().out.splitlines())) > 100  # the twin


def test_what_loses_anything_is_clearly_sooner_than_plain_ddp() -> None:
    """The twin: without plain DDP among them the one with less loss is taken, however near it was."""
    made = plan(1e9)
    plain, sooner, less_loss = (
        replace(each, step=step, option=replace(each.option, gap=gap, refused=""))
        for each, step, gap in zip(
            made.ranked,
            (1.0, 0.85, 0.92),
            (Gap(0.0, "", 1.0), Gap(3.0, "", 1.0), Gap(1.0, "", 1.0)),
            strict=False,
        )
    )
    assert choose.choose([plain, sooner, less_loss], math.inf) is sooner
    slow = replace(plain, step=2.0)
    assert choose.choose([slow, sooner, less_loss], math.inf) is less_loss
    assert choose.choose([plain, less_loss], math.inf) is plain


def test_an_exchange_that_fits_into_a_step_goes_every_step() -> None:
    model = Model(2_000_000, 0.03, 0.07)
    near, far = (between_sites(model, group(1e9, world=4, latency=latency)) for latency in (1e-4, 50e-3))
    assert near.refused
    assert not far.refused


def test_no_loss_accepted_leaves_plain_ddp() -> None:
    assert plan(20e6, gap=0.0).plain


def test_each_rejected_one_has_its_reason_and_the_best_none() -> None:
    made = plan(1e9)
    for each, reason in zip(made.ranked, made.reasons, strict=True):
        assert (reason == "") == (each.option.name == made.best.option.name), each.option.name


def test_what_a_plan_says_to_call_is_there() -> None:
    for each in plan(1e9).ranked:
        found = re.search(r"scheme=gradsieve\.(\w+)\(", each.option.call)
        assert found is None or hasattr(gradsieve, found[1])


def test_every_scheme_is_in_the_plan_once() -> None:
    names = [each.option.name for each in plan(1e9).ranked]
    assert len(names) == len(set(names))
    for wanted in (
        "dense (plain",
        "fp16",
        "PowerSGD",
        "auto",
        "stripes",
        "exdyna ",
        "spardl-paper ",
        "topk ",
    ):
        assert any(name.startswith(wanted) for name in names), wanted


def test_teams_are_formed_where_rounds_cost_much() -> None:
    def spardl(latency: float) -> str:
        costs = group(1e9, 64, latency)
        model = Model(1_000_000, 0.001, 0.002)
        made = make_plan(model, costs, 0.01, 5.0)
        return next(each.option.name for each in made.ranked if each.option.name.startswith("spardl 0"))

    assert "teams" in spardl(50e-3)
    assert "teams" not in spardl(1e-6)


def test_gaps_are_never_better_than_measured() -> None:
    assert of_bits(0.05, 4).above is None
    worst, best = BY_RANKS[4][0.15][0], BY_RANKS[4][8.0][0]
    assert of_bits(0.15, 4).above == pytest.approx(worst)
    assert best < (of_bits(0.4, 4).above or 0) < worst
    assert of_bits(99.0, 4).above == pytest.approx(best)
    middle = BY_RANKS[4][4.0][0]
    assert BY_RANKS[4][0.75][0] < best < middle
    assert of_bits(0.75, 4).above == pytest.approx(middle), "fewer bits that ended lower by chance"


@pytest.mark.parametrize(("ranks", "near"), [(2, 4), (8, 4), (9, 16), (16, 16), (17, 64), (500, 64)])
def test_whoever_has_many_ranks_is_told_what_as_many_ended_with(ranks: int, near: int) -> None:
    assert of_bits(0.75, ranks).above == pytest.approx(
        max(gap for bits, (gap, _) in BY_RANKS[near].items() if bits >= 0.75)
    )
    assert (near == 4) == ("budgets with" not in measured_with(ranks))
    assert (near == 4) == (of_bits(0.75, ranks).steps is not None)
    assert ("Nothing was measured" in measured_with(ranks)) == (ranks > 64)


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


def test_on_the_link_a_bit_takes_what_it_carries_and_a_dense_exchange_its_words() -> None:
    links, n = Links(1e-3, 32 / 1e9), 1_000_000
    assert seconds_a_bit(links, n) == pytest.approx(n / 1e9)
    host = replace(LAPTOP, memory=1e15, message=0.0)  # sockets for nothing: the link alone
    whole = dense(Model(n, 0.1, 0.2)).price(Costs(8, with_rings(links, 8), host))  # one bucket
    assert whole.link == pytest.approx(dense_seconds(n, links, 8), rel=1e-6)


def test_a_pair_that_is_clearly_slower_counts_and_noise_does_not() -> None:
    profile = Profile(8, 8, 1e-4, 1e9, 2e-5, 1.2e-4, 0.9e9, memory=10e9, selection=500e6)
    assert costs_of(profile).links.word == 32 / 1e9
    slow = replace(profile, slowest_bandwidth=1e8, slowest_latency=1e-2)
    assert costs_of(slow).links.word == 32 / 1e8
    assert costs_of(slow).links.latency == 1e-2


def test_where_pairs_are_unlike_torchs_sums_go_as_their_ring_does() -> None:
    """Two sites: pairs that are measured at once share what joins them, a ring has it for itself."""
    alike = Profile(4, 4, 1e-4, 1e9, 2e-5, 1e-4, 1e9, memory=1e15, selection=500e6, ring=Links(0.2, 32 / 1e8))
    sites = replace(alike, slowest_bandwidth=5e7, slowest_latency=4e-2)
    n = 1_000_000
    whole = dense(Model(n, 0.1, 0.2))
    assert costs_of(alike).rings is None
    assert whole.price(costs_of(sites)).link == pytest.approx(0.2 + 1.5 * 32 * n / 1e8, rel=1e-3)
    unmeasured = whole.price(costs_of(replace(sites, ring=None))).link
    assert unmeasured == pytest.approx(6 * 4e-2 + 1.5 * 32 * n / 5e7, rel=1e-3)


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


def test_from_a_profile_and_figures_in_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.toml"
    timed = ModelProfile(25_000_000, 1, 0.1, 0.2)
    profile = Profile(8, 8, 1e-4, 1e8, 2e-5, 1e-4, 1e8, memory=10e9, selection=500e6, model=timed)
    write_profile(path, profile)
    assert main(["plan", "--profile", str(path)]) == 0
    assert "RECOMMENDED" in capsys.readouterr().out
    assert main(["plan", "--profile", str(path), "--rate", "400gbit", "--memory", "900GB/s"]) == 0
    assert "Use plain DDP" in capsys.readouterr().out
    write_profile(path, replace(profile, model=None))
    assert main(["plan", "--profile", str(path), "--params", "1e6"]) == 2
    assert "--compute" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ("[links]\nlatency = 5", "version"),
        ("version = 1\n[group]\nworld = 4\nhosts = 9\n", "links"),
        ("version = 99", "later gradsieve"),
        ("\x00\x01", "line"),
    ],
)
def test_what_is_no_profile_is_refused(
    wrong: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(wrong)
    assert main(["plan", "--profile", str(path)]) == 2
    assert cause in capsys.readouterr().err


def test_what_is_missing_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for words, wanted in [
        ("plan", "--profile"),
        ("plan --world 4 --rate 1gbit", "--params"),
        ("plan --world 4 --rate 1gbit --params 1e6", "--compute"),
    ]:
        assert main(words.split()) == 2
        assert wanted in capsys.readouterr().err
