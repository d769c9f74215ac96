"""Formulas say what steps move, and the ops that stand for a step are those of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsieve.comm import lockstep
from gradsieve.comm.ops import Meter
from gradsieve.errors import ConfigError
from gradsieve.schemes import SCHEMES, make
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.baselines.topk import TopK
from gradsieve.testing.gradients import Source
from gradsieve.testing.ranks import VirtualRanks
from gradsieve.types import Ctx
from gradsieve_tools import formulas
from gradsieve_tools.bench.traffic import Case, Fleet
from laws import toys
from laws.cases import registered

N, WORLD, DENSITY = 20_000, 4, 0.01
SETTLED = 40_009
UNSETTLED = {"hard-threshold", "sidco", "exdyna-paper", "micro-paper", "oktopk-paper"}
"""Send what they will for long, many times k: no statement of theirs could be near."""
NEAR = 1.35


def counted(name: str) -> Meter:
    """One step of rank 0 after some others."""
    fleet = Fleet(Case(name, WORLD, N, DENSITY, (N // 16,) * 16))
    for _ in range(8):
        fleet.step()
    meters = [Meter(rank, WORLD) for rank in range(WORLD)]
    lockstep.run([fleet._commit(rank) for rank in range(WORLD)], meters)
    return max(meters, key=lambda meter: meter.moved)


def stated(name: str) -> Meter:
    meter = Meter(0, WORLD)
    for op in formulas.asks(make(name, DENSITY), N, WORLD):
        meter.count(op)
    return meter


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - UNSETTLED))
def test_words_and_rounds_are_those_of_a_step(name: str) -> None:
    seen, said = counted(name), stated(name)
    assert said.moved == pytest.approx(seen.moved, rel=NEAR - 1, abs=64)
    assert said.rounds == pytest.approx(seen.rounds, abs=max(2, 0.25 * seen.rounds))


def test_the_check_can_fail() -> None:
    seen = counted("topk")
    wrong = Meter(0, WORLD)
    for op in formulas.asks(make("exdyna", DENSITY), N, WORLD):
        wrong.count(op)
    assert not seen.moved / NEAR < wrong.moved < seen.moved * NEAR


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_statements_hold_for_any_number_of_ranks(name: str) -> None:
    for world in (2, 3, 1024):
        for op in formulas.asks(make(name, DENSITY), 1_000_000, world):
            assert op.tensor.device == torch.device("meta")
            Meter(0, world).count(op)


def of_formula(scheme: Scheme[Any], fleet: VirtualRanks, steps: int) -> float:
    """Words that the busiest rank moves over those of the formula, mean over steps, after ten of settling."""
    source = Source("normal", (SETTLED,))
    for _ in fleet.advance(source, 10):
        pass
    ratio = 0.0
    for round_ in fleet.advance(source, steps):
        programs = [
            scheme.exchange(acc, state, Ctx(rank, WORLD, round_.step))
            for rank, (acc, state) in enumerate(zip(round_.accs, round_.states, strict=True))
        ]
        meters = [Meter(rank, WORLD) for rank in range(WORLD)]
        lockstep.run(programs, meters)
        words = max(meter.moved for meter in meters) / 4
        ratio += words / formulas.words(scheme, SETTLED, WORLD, round_.outcomes[0].state)
    return ratio / steps


@pytest.mark.parametrize("name", ["dense", "topk"])
def test_traffic_is_exactly_what_the_formula_says(name: str) -> None:
    scheme = make(name, 0.01)
    assert of_formula(scheme, VirtualRanks(scheme, [SETTLED], WORLD), 3) == pytest.approx(1.0)


@pytest.mark.parametrize("name", registered())
def test_traffic_is_within_a_quarter_of_the_formula(name: str) -> None:
    """At the count and imbalance that the scheme reports; rows have an eighth of room over the mean."""
    scheme = make(name, 0.01)
    assert of_formula(scheme, VirtualRanks(scheme, [SETTLED], WORLD), 10) == pytest.approx(1.0, rel=0.25)


def test_a_scheme_without_a_formula_is_refused_and_one_that_inherits_is_not() -> None:
    class Mine(TopK):
        pass

    assert formulas.words(Mine(density=0.5), 100, 2) == formulas.words(TopK(density=0.5), 100, 2)
    with pytest.raises(ConfigError, match="FORMULAS does not say what Toy costs"):
        formulas.words(toys.Toy(), 100, 2)
