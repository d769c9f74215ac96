"""The model of costs and the plan: what must hold whatever the constants are."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import gradsieve
from gradsieve.comm.links import Links
from gradsieve.pipeline.budget import Adaptive
from gradsieve.pipeline.costs import Costs, Host, dense_seconds, seconds_a_bit, with_rings
from gradsieve.tools.cli.main import main
from gradsieve.tools.plan import choose
from gradsieve.tools.plan.choose import Plan, make_plan, recommendation
from gradsieve.tools.plan.options import Model, dense, every_option
from gradsieve.tools.plan.predict import costs_of, predict
from gradsieve.tools.plan.quality import of_bits
from gradsieve.tools.profiles import ModelProfile, Profile, write_profile

LAPTOP = Host(memory=10e9, selection=500e6, message=20e-6)
DEVICE = Host(memory=900e9, selection=100e9, message=20e-6)
MLP = Model(25_000_000, 0.1, 0.2)


def group(rate: float, world: int = 8, latency: float = 100e-6, host: Host = LAPTOP) -> Costs:
    return Costs(world, with_rings(Links(latency, 32 / rate), world), host)


def plan(rate: float, model: Model = MLP, world: int = 8, host: Host = LAPTOP, gap: float = 5.0) -> Plan:
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
    assert "loss above dense's" in recommendation(slow)


def test_without_a_margin_dense_would_lose_to_a_hair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the one above it: the policy decides, not the figures."""
    assert plan(100e9, host=DEVICE).plain
    monkeypatch.setattr(choose, "MARGIN", 0.0)
    assert not plan(100e9, host=DEVICE).plain


def test_what_was_not_measured_is_never_recommended() -> None:
    slow = plan(20e6)
    quickest = slow.ranked[0]
    assert quickest.option.gap.above is None or quickest.option.gap.above > 5.0
    assert slow.best.option.gap.above is not None
    assert slow.best.option.gap.above <= 5.0


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
    assert of_bits(0.05).above is None
    assert of_bits(0.15).above == pytest.approx(3.59)
    assert 1.70 < (of_bits(0.4).above or 0) < 3.59
    assert of_bits(8.0).above == pytest.approx(1.70)


def test_training_asks_the_same_model() -> None:
    links, n = Links(1e-3, 32 / 1e9), 1_000_000
    adaptive = Adaptive.over(links, n, 8)
    assert adaptive.bit == seconds_a_bit(links, n) == pytest.approx(n / 1e9)
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
