"""An accelerator that this machine does not have: layers take time on it, and next to no processor.

Forward and backward sleep, gradients appear layer by layer in DDP's order, and the optimizer moves a
sixteenth of every parameter. What is seen is how long training waits for an exchange on hosts whose
processors are idle.

A host that runs ahead queues a step in a tenth of the time that it takes the device. Our engine then finds
what it reads when the device has come so far, as behind an event of a stream, and seconds are the device's.
Dense and torch's hooks do not wait for it: they look better than they would be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradsieve.parallel.ddp import DdpSync

IDLE = "idle"
_LAYERS = 8
_ROWS = 100
_MOVED = 16
_HOST_SHARE = 0.1  # share of the device's time that queuing takes on a host which runs ahead


@dataclass(slots=True)
class Device:
    """Works off what is queued, one after the other."""

    seconds: float  # seconds that a step computes; a third of them in the forward
    ahead: bool = False
    busy_until: float = 0.0

    def launch(self, seconds: float) -> None:
        self.busy_until = max(time.perf_counter(), self.busy_until) + seconds
        if self.ahead:
            time.sleep(_HOST_SHARE * seconds)
        else:
            self.wait(self.busy_until)

    def wait(self, until: float | None = None) -> None:
        """Sleep until the device has come so far; by default, to the end of its queue."""
        left = (self.busy_until if until is None else until) - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, device: Device) -> Tensor:
        ctx.device = device
        device.launch(device.seconds / 3 / _LAYERS)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.device.launch(2 * ctx.device.seconds / 3 / _LAYERS)
        return gradients[0], None, None


class Idle(nn.Module):
    """Hold parameters without computing with them."""

    def __init__(self, params: int, device: Device) -> None:
        super().__init__()
        columns = params // (_LAYERS * _ROWS)
        self.weights = nn.ParameterList(
            nn.Parameter(0.02 * torch.randn(_ROWS, columns, dtype=torch.float32, device="cpu"))
            for _ in range(_LAYERS)
        )
        self.device = device

    def forward(self, rows: Tensor) -> Tensor:
        for weight in self.weights:
            rows = _Layer.apply(rows, weight, self.device)  # type: ignore[no-untyped-call]
        return rows


def batch() -> tuple[Tensor, Tensor]:
    """Inputs and targets of such a model, of any size."""
    rows = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
    return rows, torch.ones_like(rows, requires_grad=False)


class Drift(torch.optim.SGD):
    """Moves a part of every parameter, another one in each step: a device would move all of it, for free."""

    def __init__(self, parameters: list[nn.Parameter], seed: int) -> None:
        super().__init__(parameters, lr=0.1)
        longest = max(parameter.numel() for parameter in parameters) // _MOVED
        source = torch.Generator().manual_seed(seed)
        self._noise = 1e-3 * torch.randn(longest, dtype=torch.float32, device="cpu", generator=source)
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                part = parameter.numel() // _MOVED
                start = self._steps % _MOVED * part
                parameter.view(-1)[start : start + part] += self._noise[:part]
        self._steps += 1


def emulate(sync: DdpSync, device: Device, spins: bool) -> None:
    """Let a sync wait for the device, and its thread spin while a collective is carried."""
    if device.ahead:
        _behind_events(sync, device)
    if spins:
        _spinning(sync)


def _behind_events(sync: DdpSync, device: Device) -> None:
    submit = sync.engine.call

    def call(function: Callable[[], Any], where: torch.device) -> Future[Any]:
        reached = device.busy_until

        def job() -> Any:
            device.wait(reached)
            return function()

        return submit(job, where)

    def moment() -> float:
        now = time.perf_counter()
        return max(now, device.busy_until) if threading.current_thread() is threading.main_thread() else now

    sync.engine.call = call  # type: ignore[method-assign, assignment]
    if sync.pipeline.timer is not None:
        sync.pipeline.timer.moment = moment  # type: ignore[method-assign]


def _spinning(sync: DdpSync) -> None:
    perform = sync.engine.perform

    def spin(op: Any) -> Tensor:
        done: Future[Tensor] = Future()

        def carry() -> None:
            try:
                done.set_result(perform(op))
            except BaseException as error:  # whatever it is belongs to the thread that spins
                done.set_exception(error)

        threading.Thread(target=carry, daemon=True).start()
        while not done.done():
            time.sleep(0)
        return done.result()

    sync.engine.perform = spin  # type: ignore[method-assign]
