"""An emulated accelerator takes time and no processor, and what reads from it waits for it."""

from __future__ import annotations

import time

import pytest
import torch

from gradsieve_tools.bench.common.idle import Device, Idle, batch


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
