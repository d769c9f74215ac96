"""The doctor's verdict: each rule finds its fault, and nothing on a group that is well (its red twin)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn

from gradsieve.comm.links import Links
from gradsieve.errors import Malformed
from gradsieve_tools.doctor import evaluate, model
from gradsieve_tools.doctor.answers import Answer, facts_from
from gradsieve_tools.doctor.facts import Facts, Interface, collect
from gradsieve_tools.doctor.findings import Finding, Measured, exit_code
from gradsieve_tools.doctor.model import ModelFigures
from gradsieve_tools.doctor.pairs import partner, rounds
from gradsieve_tools.doctor.run import Report, put_together
from gradsieve_tools.doctor.view import profile_of, text

LO = Interface("lo", "127.0.0.1", "127.0.0.0/8", True, True)


def facts_of(rank: int, **changes: Any) -> Facts:
    eth0 = Interface("eth0", f"10.0.0.{rank + 1}", "10.0.0.0/24", True, False, 10**9)
    eth1 = Interface("eth1", f"10.9.0.{rank + 1}", "10.9.0.0/24", True, False, 10**9)
    well = Facts(
        rank=rank,
        hostname=f"node{rank}",
        alias="",
        machine=f"m{rank}",
        host=f"m{rank}/1",
        interfaces=(LO, eth0, eth1),
        resolved=(eth0.address,),
        toward_master=eth0.address,
        environment={"GLOO_SOCKET_IFNAME": "eth0"},
        threads=8,
        cores=8,
        quota=0.0,
        kernels="compiled",
        versions={"torch": "2.13.0", "gradsieve": "0.1", "python": "3.11.7"},
    )
    return replace(well, **changes)


def group(world: int = 4, **changes: Mapping[int, Any]) -> list[Facts]:
    """`field={rank: value}` changes one field of one rank."""
    return [
        facts_of(rank, **{name: by_rank[rank] for name, by_rank in changes.items() if rank in by_rank})
        for rank in range(world)
    ]


Rows = list[list[float | None]]


def square(world: int, usual: float, other: Mapping[tuple[int, int], float] | None = None) -> Rows:
    """The same both ways for each pair."""
    changed = {frozenset(pair): value for pair, value in (other or {}).items()}
    ranks = range(world)
    return [[None if i == j else changed.get(frozenset((i, j)), usual) for j in ranks] for i in ranks]


def measured(world: int = 4, **changes: Any) -> Measured:
    well = Measured(
        latency=square(world, 1e-4), bandwidth=square(world, 1e9), pace=dict.fromkeys(range(world), 1e9)
    )
    return replace(well, **changes)


Found = list[tuple[str, str, tuple[int, ...]]]


def found(facts: list[Facts], figures: Measured | None = None, timeout: float = 60.0) -> Found:
    findings = evaluate.after(facts, figures or measured(len(facts)), timeout)
    assert all(finding.fix for finding in findings)
    return [(finding.severity, finding.rule, finding.ranks) for finding in findings]


def only(facts: list[Facts], figures: Measured | None = None, timeout: float = 60.0) -> Finding:
    (finding,) = evaluate.after(facts, figures or measured(len(facts)), timeout)
    return finding


def test_a_group_that_is_well_has_no_finding() -> None:
    for world in (1, 2, 4, 7):
        facts = group(world)
        assert evaluate.before(facts, world) == []
        assert found(facts) == []
        assert exit_code(evaluate.after(facts, measured(world), 60.0)) == 0


# --- before anything is measured


def test_a_rank_that_does_not_report_is_named() -> None:
    (finding,) = evaluate.before(group()[:3], 4)
    assert (finding.severity, finding.rule, finding.ranks) == ("error", "missing-rank", (3,))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"environment": {"GLOO_SOCKET_IFNAME": "ib0"}}, "there is no such interface, only lo, eth0, eth1"),
        ({"environment": {"GLOO_SOCKET_IFNAME": "lo"}}, "listens on lo, where other hosts cannot reach it"),
        ({"environment": {}, "resolved": ("127.0.0.1",)}, "is not set, and node2 leads to 127.0.0.1"),
        ({"environment": {}, "resolved": ()}, "is not set, and node2 leads to no address"),
    ],
)
def test_where_nobody_can_reach_it_gloo_is_told_where_to_listen(changes: dict[str, Any], what: str) -> None:
    facts = group(**{name: {2: value} for name, value in changes.items()})
    (finding,) = evaluate.before(facts, 4)
    assert (finding.severity, finding.ranks) == ("error", (2,))
    assert what in finding.what
    assert finding.fix == "export GLOO_SOCKET_IFNAME=eth0   # on node2"
    loopback = {"GLOO_SOCKET_IFNAME": "lo"}
    alone = [replace(each, host="one", environment=loopback) for each in group(2)]
    assert evaluate.before(alone, 2) == []  # on one host the loopback is right


# --- interfaces


def test_the_wrong_interface_is_named_with_its_mend() -> None:
    facts = group(environment={1: {"GLOO_SOCKET_IFNAME": "eth1"}})
    finding = only(facts, measured(connections={1: {"eth1": 3}}))
    assert (finding.severity, finding.rule, finding.ranks) == ("error", "wrong-interface", (1,))
    assert "eth1 (10.9.0.2)" in finding.what
    assert "3 connections run over eth1" in finding.what
    assert finding.fix == "export GLOO_SOCKET_IFNAME=eth0   # on node1"


def slow(links: Mapping[tuple[int, int], float]) -> Measured:
    return measured(bandwidth=square(4, 1e9, links))


def far(seconds: float) -> Measured:
    return measured(latency=square(4, 1e-4, {(2, other): seconds for other in (0, 1, 3)}))


def paces(last: float) -> Measured:
    return measured(pace={0: 1e9, 1: 1e9, 2: 1e9, 3: last})


def of_version(name: str) -> list[Facts]:
    return group(versions={2: {**facts_of(2).versions, name: "9"}})


@pytest.mark.parametrize(
    ("facts", "figures", "wanted"),
    [
        (group(environment={2: {}}), measured(), [("note", "unset-interface", (2,))]),
        (group(), slow({(3, other): 1e8 for other in range(3)}), [("warning", "slow-link", (3,))]),
        (group(), slow({(1, 2): 1e8}), [("warning", "slow-pair", (1, 2))]),
        (group(), far(0.03), [("warning", "far-rank", (2,))]),
        (group(), far(0.0012), []),
        (group(), paces(2e8), [("warning", "straggler", (3,))]),
        (group(), paces(6e8), []),
        (group(quota={1: 2.5}), measured(), [("warning", "quota", (1,))]),
        (group(quota={1: 8.0}), measured(), []),
        (of_version("torch"), measured(), [("error", "versions", (2,))]),
        (of_version("python"), measured(), [("note", "versions", (2,))]),
    ],
)
def test_each_rule_finds_its_fault_and_no_other(facts: list[Facts], figures: Measured, wanted: Found) -> None:
    assert found(facts, figures) == wanted


def test_more_threads_than_processors_are_named_with_the_number_to_set() -> None:
    facts = [replace(each, host="m0/1", machine="m0") for each in group(4)]
    finding = only(facts)
    assert (finding.rule, finding.fix) == ("too-many-threads", "export OMP_NUM_THREADS=2   # on node0")
    assert "32 threads on 8 processors" in finding.what


# --- time-outs and the model


def test_a_conflict_of_hooks_is_told_with_its_mend() -> None:
    (conflict,) = model.conflicts_of(nn.Embedding(10, 4, sparse=True))
    finding = only(group(), measured(model=ModelFigures(40, 1, conflicts=[conflict])))
    assert (finding.severity, finding.rule, finding.fix) == (
        "error",
        "hook-conflict",
        "create it with sparse=False",
    )


def factory() -> tuple[nn.Module, Any]:
    layer = nn.Linear(20, 5)
    return layer, lambda it: it(torch.ones(2, 20)).sum()


def test_a_model_is_built_counted_and_timed() -> None:
    figures = model.measure(*model.build(f"{__name__}:factory"))
    assert (figures.parameters, figures.units, figures.conflicts) == (105, 1, [])
    assert figures.forward is not None
    assert figures.forward > 0
    assert model.measure(nn.Linear(2, 2), None).forward is None


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 13, 64])
def test_in_all_rounds_everybody_meets_everybody_once(world: int) -> None:
    used = rounds(world)
    assert len(used) == world - 1 + world % 2
    met = []
    for number in used:
        partners = [partner(world, number, rank) for rank in range(world)]
        assert partners.count(None) == world % 2
        pairs = {(rank, other) for rank, other in enumerate(partners) if other is not None}
        assert all((other, rank) in pairs and rank != other for rank, other in pairs)
        met += sorted(pairs)
    assert sorted(met) == [(a, b) for a in range(world) for b in range(world) if a != b]


# --- what ranks tell


def test_facts_survive_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsieve_tools.doctor.facts.active", lambda: "compiled")  # loads nothing
    facts = collect(0, "127.0.0.1")
    assert facts_from(0, json.loads(json.dumps(asdict(facts)))) == facts
    assert facts.listens_on is not None
    assert facts.cores >= 1


ANSWER = {
    "latency": {"1": 1e-4},
    "incoming": {"1": 1e9},
    "failed": {},
    "message": 1e-5,
    "memory": 8e9,
    "selection": 1e9,
    "pace": 1e9,
    "launch": 0.0,
    "connections": {"eth0": 1},
    "ring": {"latency": 0.02, "word": 1e-7},
    "model": {"parameters": 10, "units": 1, "forward": 0.1, "backward": 0.2, "conflicts": []},
    "error": "",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("latency", {"7": 1e-4}),
        ("incoming", {"1": float("nan")}),
        ("memory", -1.0),
        ("error", "x" * 10_000),
        ("model", {"parameters": "many"}),
        ("failed", {"1": 3}),
        ("ring", {"latency": 1e-3, "word": 0.0}),
    ],
)
def test_what_cannot_be_measured_is_malformed(name: str, value: Any) -> None:
    assert Answer.read(0, 2, ANSWER).incoming == {1: 1e9}
    with pytest.raises(Malformed, match="rank 0 sent the doctor"):
        Answer.read(0, 2, {**ANSWER, name: value})
    with pytest.raises(Malformed):
        Answer.read(0, 2, [])


def test_a_report_says_all_is_well_and_makes_a_profile() -> None:
    other = {**ANSWER, "latency": {"0": 1e-4}, "incoming": {"0": 5e8}, "memory": 4e9}
    answers = {0: Answer.read(0, 2, ANSWER), 1: Answer.read(1, 2, other)}
    figures = put_together(answers, 2)
    assert figures.bandwidth == [[None, 5e8], [1e9, None]]
    facts = group(2)
    report = Report(2, facts, evaluate.after(facts, figures, 60.0), figures, answers)
    said = text(report)
    assert said.endswith("all is well")
    assert "slowest pair: rank 0 (node0) to rank 1 (node1), 500 Mbit/s" in said
    assert "a sum by gloo, around a ring: 20 ms however short, 320 Mbit/s" in said
    profile = profile_of(report)
    assert (profile.slowest_bandwidth, profile.memory, profile.hosts) == (5e8, 4e9, 2)
    assert profile.ring == Links(0.02, 1e-7)
    assert profile.model is not None
    assert profile.model.backward == 0.2
