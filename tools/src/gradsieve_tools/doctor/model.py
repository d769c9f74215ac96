"""The user's own model: how large it is, how long a step takes, and what would keep a sync from it.

`--model module:factory` names a function without arguments. It returns a model, or a model and a function
that takes it and returns a loss, for a batch such as training has:

    def build():
        model, x, y = Net(), torch.randn(32, 784), torch.randint(10, (32,))
        return model, lambda model: F.cross_entropy(model(x), y)
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsieve.attaching import ddp_in, refuse_sparse_gradients
from gradsieve.errors import ConfigError
from gradsieve.pipeline import UNIT_CAP_MB
from gradsieve.pipeline.exchange_settings import Steps
from gradsieve.torch_names import acts_on_gradient, without_compile
from gradsieve.units import make_units

Loss = Callable[[nn.Module], Tensor]
WARM, STEPS = 2, 5


@dataclass(frozen=True, slots=True)
class ModelFigures:
    parameters: int  # trained parameters
    units: int  # units of exchange, as `attach` makes them by default
    forward: float | None = None  # seconds; None where the factory gives no loss
    backward: float | None = None
    conflicts: list[str] = field(default_factory=list)  # reasons why no sync can be attached


def build(spec: str) -> tuple[nn.Module, Loss | None]:
    """Load `module:factory` as `python -m` finds modules, from the current folder."""
    module_name, colon, factory_name = spec.partition(":")
    if not (module_name and colon and factory_name):
        raise ConfigError(f"--model is module:factory, such as train:build, not {spec!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--model {spec}: {error}") from error
    made: Any = factory()
    model, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not (loss is None or callable(loss)):
        raise ConfigError(
            f"--model {spec} returned {type(made).__name__}: it returns a model, or a model and a function "
            "that takes the model and returns its loss"
        )
    return model, loss


def measure(model: nn.Module, loss: Loss | None) -> ModelFigures:
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    try:
        units = len(make_units(trained, int(UNIT_CAP_MB * 2**20), Steps().small))
        conflicts = []
    except ConfigError as error:
        units, conflicts = 0, [str(error)]
    conflicts += conflicts_of(model)
    forward, backward = (None, None) if loss is None else _step(model, loss)
    return ModelFigures(sum(each.numel() for _, each in trained), units, forward, backward, conflicts)


def conflicts_of(model: nn.Module) -> list[str]:
    found = []
    inner = without_compile(model)
    try:
        if isinstance(inner, DistributedDataParallel):
            ddp_in(inner)
        else:
            refuse_sparse_gradients(inner)
    except ConfigError as error:
        found.append(str(error))
    sharded = sorted({type(each).__name__ for each in inner.modules() if _is_sharded(each)})
    if sharded:
        found.append(f"{', '.join(sharded)} exchanges gradients by itself: put DDP around the model")
    hooked = [name for name, each in inner.named_parameters() if acts_on_gradient(each)]
    if hooked:
        found.append(
            f"{len(hooked)} parameters, {hooked[0]!r} first, have hooks that run before a gradient was "
            "exchanged: take an optimizer in backward out"
        )
    return found


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(module).__mro__)


def _step(model: nn.Module, loss: Loss) -> tuple[float, float]:
    """Median seconds of forward and of backward; gradients are as they were: none."""
    forwards, backwards = [], []
    for _ in range(WARM + STEPS):
        model.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        value = loss(model)
        _settle(value)
        between = time.perf_counter()
        value.backward()  # type: ignore[no-untyped-call]
        _settle(value)
        end = time.perf_counter()
        forwards.append(between - begin)
        backwards.append(end - between)
    model.zero_grad(set_to_none=True)
    return statistics.median(forwards[WARM:]), statistics.median(backwards[WARM:])


def _settle(value: Tensor) -> None:
    """An accelerator has only queued it so far."""
    if value.device.type != "cpu":
        torch.accelerator.synchronize(value.device)
