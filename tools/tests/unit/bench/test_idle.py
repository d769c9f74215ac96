"""An emulated accelerator takes time and no processor, and what reads from it waits for it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradsieve_tools.bench.common.idle import Device, Idle, batch, emulate


class Clock:
    now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(time, "sleep", made.sleep)
    return made


def step(model: Idle) -> None:
    inputs, target = batch()
    torch.nn.functional.mse_loss(model(inputs), target).backward()


def test_a_step_takes_as_long_as_was_asked_for(clock: Clock) -> None:
    model = Idle(100_000, Device(0.3))
    assert sum(each.numel() for each in model.parameters()) == 100_000
    step(model)
    assert clock.now == pytest.approx(100.3)


def test_a_host_that_runs_ahead_has_queued_it_in_a_tenth(clock: Clock) -> None:
    device = Device(0.3, ahead=True)
    step(Idle(100_000, device))
    assert clock.now == pytest.approx(100.03)
    assert device.busy_until == pytest.approx(100.3, abs=0.01)
    device.wait()
    assert clock.now == pytest.approx(device.busy_until)


class Engine:
    """Runs what it is given at once."""

    def call(self, call: Any, where: torch.device) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call())
        return done

    def perform(self, op: str) -> str:
        time.sleep(0.05)
        if op == "broken":
            raise RuntimeError("broken")
        return op


class Sync:
    def __init__(self) -> None:
        self.engine, self.pipeline = Engine(), SimpleNamespace(timer=SimpleNamespace())


def test_what_the_engine_reads_is_there_when_the_device_has_come_so_far(clock: Clock) -> None:
    sync, device = Sync(), Device(0.3, ahead=True)
    emulate(sync, device, spins=False)  # type: ignore[arg-type]
    device.launch(1.0)
    assert sync.pipeline.timer.moment() == pytest.approx(101.0), "when the device will be there"
    read = sync.engine.call(lambda: clock.now, torch.device("cpu"))
    assert read.result() == pytest.approx(101.0)
