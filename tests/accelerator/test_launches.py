"""How much a step makes the host do for a device: launches, and waits for it.

Counted on the fake device. Where CUDA has one launch (a kernel of ours in Triton, torch's `foreach`), what
the fake device runs in its place counts as one; `select`, which is more, does not occur here. What the model
and the optimizer launch is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from accelerator.detector import Line
from accelerator.recorder import recording
from accelerator.trainings import device_called, group_for, kernels_of_a_device
from gradsieve import kernels, step_length, torch_names, types
from gradsieve.kernels import torch_low_bit, torch_passes
from multiproc.harness import Ranks

MOST, MOST_WITH_MOMENTUM, MOST_A_PARAMETER, MOST_WAITS = 140, 170, 5.0, 3
"""Launches with six parameters, and for each one more: they lie apart, and kernels take one at a time."""
TOGETHER = ("copy_all", "lerp_all", "scale_all")
STAGED = "engine.py"
"""Gloo reads memory of the host: there is one wait for each of its messages, which are few."""


def as_one(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, whose launches are one."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        torch.ops.gradsieve_fake.note("kernel", name)
        try:
            return call(*args, **kwargs)
        finally:
            torch.ops.gradsieve_fake.note("kernel_ends", name)

    return noted


class InOneLaunch:
    """Kernels as they are on CUDA."""

    def __init__(self, form: Any) -> None:
        self._form = form

    def __getattr__(self, name: str) -> Any:
        return as_one(name, getattr(self._form, name))


def counted(lines: Iterable[Line]) -> Counter[str]:
    """Launches, waits that no message of gloo's needs, and copies for which the host would wait although it
    needs nothing from the device."""
    found: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    for line in lines:
        inside[line.thread] += {"kernel": 1, "kernel_ends": -1}.get(line.kind, 0)
        if line.kind == "kernel":
            found["launches"] += inside[line.thread] == 1
        elif line.kind.startswith("launch") and line.where and not inside[line.thread]:
            found["launches"] += 1
            found["waits"] += line.kind == "launch_and_wait" and STAGED not in line.where
    return found


def launches(
    rank: int, library: Path, layers: int, momentum: bool = False, pageable: bool = False
) -> list[Counter[str]]:
    """Of two steps, of which the second sends probes of gradients and the first does not.

    Ranks have batches of their own. With equal ones their gradients agree but for rounding, and chance says
    in which step the length of steps is first other than 1 and the optimizer is tried out for it.
    """
    device = device_called("fake", library)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)]).to(device)
    ddp = DistributedDataParallel(model, process_group=group_for(device))
    kind = torch.optim.AdamW if momentum else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-4, foreach=False)
    sync = gradsieve.attach(ddp, optimizer, bits=0.3 if momentum else 0.75)  # little enough for noise in each
    assert len(sync.pipeline.units) == 1
    plain, packed = InOneLaunch(torch_passes), InOneLaunch(torch_low_bit)
    norm = as_one("foreach", torch.nn.utils.get_total_norm)
    together = {name: as_one("foreach", getattr(torch_names, name)) for name in TOGETHER}
    batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(1 + rank)).to(device)
    found, lines = [], []
    with (
        kernels_of_a_device(),
        mock.patch.object(kernels, "_passes", return_value=plain),
        mock.patch.object(kernels, "_low_bit", return_value=packed),
        mock.patch.object(torch.nn.utils, "get_total_norm", norm),
        mock.patch.multiple(step_length, **together),
        mock.patch.object(types, "can_pin", return_value=not pageable),
        mock.patch("accelerator.recorder.Detector.read", lambda _, read: lines.extend(read)),
    ):
        for step in range(6):
            lines.clear()
            with recording():
                optimizer.zero_grad()
                ddp(batch).square().sum().backward()
                optimizer.step()
            if step >= 4:
                found.append(counted(lines))
    sync.close()
    return found


@pytest.mark.parametrize("momentum", [False, True], ids=["SGD", "AdamW"])
def test_a_step_launches_little_and_waits_seldom(two: Ranks, library: Path, momentum: bool) -> None:
    few, many = (two.run(launches, library, layers, momentum)[0] for layers in (3, 12))
    for six, more in zip(few, many, strict=True):
        print(f"6 parameters: {dict(six)}; 24 parameters: {dict(more)}")
        assert 0 < six["launches"] <= (MOST_WITH_MOMENTUM if momentum else MOST)
        assert (more["launches"] - six["launches"]) / 18 <= MOST_A_PARAMETER
        assert six["waits"] == more["waits"] <= MOST_WAITS


def test_copies_from_pageable_memory_would_be_seen(two: Ranks, library: Path) -> None:
    for step in two.run(launches, library, 3, False, True)[0]:
        assert step["waits"] > MOST_WAITS
