"""A rank of the self-test with a fault in it: that which the environment names."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsieve import errors, kernels
from gradsieve.pipeline.budget import Budget, Timer
from gradsieve_tools.doctor.self_test import rank, trainings

PLANTED = "GRADSIEVE_TEST_PLANTED"
_kept: list[Tensor] = []


def _a_wrong_bit() -> None:
    accumulate = kernels.accumulate

    def wrong(residual: Tensor, gradient: Tensor, scale: float, out: Tensor) -> bool:
        fine = accumulate(residual, gradient, scale, out)
        if kernels.active() == "compiled" and out.dtype == torch.float32 and len(out) == 1000:
            out.view(torch.int32)[777] ^= 1
        return fine

    kernels.accumulate = wrong


def _a_crash() -> None:
    accumulate = kernels.accumulate
    kernels.accumulate = lambda x, *rest: os.abort() if len(x) == 1000 else accumulate(x, *rest)


def _a_slow_kernel() -> None:
    select = kernels.select

    def slow(x: Tensor, *rest: Any) -> Any:
        time.sleep(1.0 if len(x) >= 1 << 18 else 0.0)
        return select(x, *rest)

    kernels.select = slow


def _a_bit_of_a_weight() -> None:
    """On the device alone, and on both ranks: they stay the same, and are not what the CPU has."""
    attach = trainings.attach

    def other(ddp: Any, optimizer: Any, **settings: Any) -> Any:
        if kernels.active() == "compiled":  # the CPU's training has torch's kernels
            ddp.module[0].bias.data.view(torch.int32)[0] ^= 1
        return attach(ddp, optimizer, **settings)

    trainings.attach = other


def _a_leak() -> None:
    step = trainings.Training.step

    def leaking(self: trainings.Training, number: int) -> float:
        _kept.append(torch.full((50_000,), 1.0))
        return step(self, number)

    trainings.Training.step = leaking


def _no_broadcasts() -> None:
    DistributedDataParallel._sync_buffers = lambda _: None


def _no_budget() -> None:
    Timer.after = lambda self: Budget(0.15, is_chosen=False)


def _nobody_to_blame() -> None:
    begin = errors.PeerError.__init__
    errors.PeerError.__init__ = lambda self, message, ranks=(): begin(self, message)


FAULTS: dict[str, tuple[str, Callable[[], None]]] = {
    "a wrong bit": ("kernels", _a_wrong_bit),
    "a crash": ("kernels", _a_crash),
    "a slow kernel": ("bandwidth", _a_slow_kernel),
    "a bit of a weight": ("training", _a_bit_of_a_weight),
    "a leak": ("memory", _a_leak),
    "no broadcasts of buffers": ("batch norm", _no_broadcasts),
    "no budget": ("budget", _no_budget),
    "nobody to blame": ("killed rank", _nobody_to_blame),
}
"""Each with the check that finds it."""

if __name__ == "__main__":
    FAULTS[os.environ[PLANTED]][1]()
    rank.main()
