"""What schemes say that they ask for is what their steps ask for."""

import pytest
import torch

from gradsieve.comm import lockstep
from gradsieve.comm.meter import Meter
from gradsieve.schemes import SCHEMES, make
from gradsieve.types import Ctx
from gradsieve_lab.bench.traffic import Case, Fleet

N, WORLD, DENSITY = 20_000, 4, 0.01
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
    for op in make(name, DENSITY).asks(N, WORLD):
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
    for op in make("exdyna", DENSITY).asks(N, WORLD):
        wrong.count(op)
    assert not seen.moved / NEAR < wrong.moved < seen.moved * NEAR


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_statements_hold_for_any_number_of_ranks(name: str) -> None:
    for world in (2, 3, 1024):
        for op in make(name, DENSITY).asks(1_000_000, world):
            assert op.tensor.device == torch.device("meta")
            Meter(0, world).count(op)


def test_codes_are_counted_as_they_travel() -> None:
    scheme = make("stripes")
    said, fleet = Meter(0, WORLD), scheme.init_state([N], WORLD)
    for op in scheme.asks(N, WORLD):
        said.count(op)
    meters = [Meter(rank, WORLD) for rank in range(WORLD)]
    acc = torch.randn(N, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        programs = [scheme.exchange(acc.clone(), fleet, Ctx(rank, WORLD, 0)) for rank in range(WORLD)]
        fleet = lockstep.run(programs, meters)[0].state
    assert said.moved == pytest.approx(meters[0].moved / 3, rel=0.15)  # stretches are a third, not 0.3
