"""Where collectives return before they are done, what an exchange is seen to cost is what was waited for.

Virtual ranks, a virtual clock, and ops that behave as an accelerator's: queued at once, paid for when the
host looks at what they gave.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from gradsieve import telemetry
from gradsieve.comm import links, lockstep
from gradsieve.comm.meter import Meter
from gradsieve.comm.ops import Op
from gradsieve.pipeline import StepPipeline, base, steps
from gradsieve.schemes import ExDyna, exclusive
from gradsieve.types import Ctx, to_host

WORLD, BYTES_A_SECOND, LAUNCH, LATENCY = 2, 125e6, 20e-6, 50e-6
CPU = torch.device("cpu")


class Clock:
    """Seconds so far, and those that nobody has waited for yet."""

    def __init__(self) -> None:
        self.now = self.owed = 0.0

    def perf_counter(self) -> float:
        self.now += 5e-6
        return self.now

    def pay(self) -> None:
        self.now, self.owed = self.now + self.owed, 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, perform = Clock(), lockstep._perform

    def queue(ops: list[Op]) -> object:
        meter = Meter(0, len(ops))
        meter.count(ops[0])
        clock.now += LAUNCH
        clock.owed += LATENCY + meter.moved / BYTES_A_SECOND
        return perform(ops)

    def look(tensor: torch.Tensor) -> object:
        clock.pay()
        return to_host(tensor)

    for module in (base, telemetry, links):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    for module in (base, steps, exclusive, links):
        monkeypatch.setattr(module, "to_host", look)
    monkeypatch.setattr(lockstep, "_perform", queue)
    return clock


def exchanges(clock: Clock, count: int) -> list[bool]:
    """Which of them went dense."""
    models = [{"w": torch.randn(200, 1000, generator=torch.Generator().manual_seed(0))} for _ in range(WORLD)]
    ranks = [
        StepPipeline(model.items(), ExDyna(density=0.001), rank, WORLD) for rank, model in enumerate(models)
    ]
    seen = lockstep.run([links.measure_links(Ctx(rank, WORLD, 0), CPU) for rank in range(WORLD)])
    for rank, measured in zip(ranks, seen, strict=True):
        rank.fall_back(measured)
    dense = []
    for step in range(count):
        lockstep.run([rank.program(0, rank.own) for rank in ranks])
        clock.pay()  # the end of the stream
        for number, rank in enumerate(ranks):
            rank.finish(rank.own)
            source = torch.Generator().manual_seed(10 * step + number)
            rank.own["w"] -= 1e-3 * torch.randn(200_000, generator=source)
        dense.append(ranks[0]._ways[0].was_dense)
    return dense


def test_links_are_timed_to_their_end(clock: Clock) -> None:
    measured = lockstep.run([links.measure_links(Ctx(rank, WORLD, 0), CPU) for rank in range(WORLD)])[0]
    assert measured.word == pytest.approx(4 / BYTES_A_SECOND, rel=0.1)


def test_a_slow_link_is_not_taken_for_a_fast_one(clock: Clock) -> None:
    assert not any(exchanges(clock, 24)), "dense takes fifteen times as long"


def test_without_the_wait_at_its_end_it_would_be(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The twin: with the launch timed, dense is taken for ever. The log says so."""
    monkeypatch.setattr(base, "to_host", to_host)
    monkeypatch.setattr(links, "to_host", to_host)
    with caplog.at_level(logging.INFO, "gradsieve"):
        assert sum(exchanges(clock, 24)) > 8
    (said,) = caplog.messages
    assert "unit 0 of 1: goes dense from here on, not sparse: an exchange takes" in said
