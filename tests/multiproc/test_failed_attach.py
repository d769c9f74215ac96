"""An attach that fails, wherever in the constructor, leaves model and optimizer as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

import gradsieve
from gradsieve import attached, hooks, sync
from gradsieve.parallel.ddp import DdpSync
from multiproc.harness import Ranks

GRADIENTS = gradsieve.Gradients()
PLACES: dict[str, tuple[Any, str]] = {
    "the hooks on the model": (hooks, "register_hooks"),
    "the hooks on optimizers": (attached, "OptimizerHooks"),
    "what is looked at first": (sync.ranks_alike, "start_alike"),
    "what is said at the end": (sync.startup, "report_settings"),
}


class BrokenError(RuntimeError):
    """Of a place in the constructor."""


def parts() -> tuple[DistributedDataParallel, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 4))
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    return DistributedDataParallel(model), torch.optim.SGD(model.parameters(), **settings)  # type: ignore[arg-type]


def left_behind(ddp: DistributedDataParallel, optimizer: torch.optim.SGD) -> list[str]:
    """What an attach that failed has left, in words."""
    (group,) = optimizer.param_groups
    out = [name for name in ("momentum", "weight_decay", "nesterov") if not group[name]]
    model = ddp.module
    hooks = (model._forward_pre_hooks, model._forward_hooks, model._state_dict_pre_hooks)
    out += ["hooks on the model"] * any(hooks)
    out += ["hooks on optimizers"] * bool(_global_optimizer_pre_hooks)
    return out


def attached_in_vain(rank: int, place: str, preset: Any) -> tuple[list[str], bool]:
    """What is left after it, and whether plain DDP averages gradients and another attach works."""
    ddp, optimizer = parts()
    memory = [p.data_ptr() for p in ddp.parameters()]

    def breaks(*_: Any, **__: Any) -> None:
        raise BrokenError(place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*PLACES[place], breaks)
        with pytest.raises(BrokenError, match=place):
            gradsieve.attach(ddp, optimizer, density=0.1, exchange=preset)
    left = left_behind(ddp, optimizer)
    left += ["other memory"] * (memory != [p.data_ptr() for p in ddp.parameters()])
    ddp(torch.full((4, 8), float(rank))).sum().backward()
    first = next(ddp.parameters()).grad
    assert first is not None
    averaged = torch.zeros_like(first).copy_(first)
    torch.distributed.all_reduce(averaged)
    same = torch.equal(averaged, 2 * first)
    sync: DdpSync = gradsieve.attach(ddp, optimizer, density=0.1, exchange=preset)
    for _ in range(2):
        ddp(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    sync.close()
    return left, same


@pytest.mark.parametrize("preset", [None, GRADIENTS], ids=["steps", "gradients"])
@pytest.mark.parametrize("place", PLACES)
def test_whatever_breaks_gives_all_back(two: Ranks, place: str, preset: Any) -> None:
    if preset is GRADIENTS and place == "the hooks on the model":
        pytest.skip("where gradients are exchanged, none are registered")
    assert two.run(attached_in_vain, place, preset) == [([], True)] * 2
