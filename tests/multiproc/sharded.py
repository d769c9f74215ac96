"""Trainings of a model that is sharded inside hosts and exchanged between them; two ranks are a host."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import gradsieve
from multiproc.models import Whole, batch, whole_numbers
from previews import fix_preview
from repeatable import repeatable

SHAPES = ((65, 24), (7,), (8, 8), (40, 100), (1, 30), (33, 40))
"""Of which two shards are equal, unlike, or empty."""
RATE = 0.125


def mesh_of(hosts: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (hosts, shards), mesh_dim_names=("replicate", "shard"))


class Odd(nn.Module):
    """Learns; no dimension divides by 2 or 4, and the last layer has fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(32, 61), nn.Linear(61, 45)
        self.last = nn.Linear(45, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.second(self.first(inputs).tanh()).tanh())


def sharded(model: nn.Module, mesh: DeviceMesh) -> Any:
    """Layer by layer, as FSDP's users do."""
    for layer in model.children():
        if next(layer.parameters(recurse=False), None) is not None and not isinstance(
            layer, nn.ParameterList
        ):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Training:
    def __init__(self, hosts: int = 2, shards: int = 2, attached: bool = True, **settings: Any) -> None:
        self.rank, self.mesh = dist.get_rank(), mesh_of(hosts, shards)
        self.model = sharded(Odd(), self.mesh["shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if attached:
            replicate = self.mesh["replicate"]
            self.sync = gradsieve.attach(self.model, self.optimizer, replicate=replicate, **settings)

    def train(
        self, begin: int, end: int, micro: int = 1, accumulate: str = "set_requires_gradient_sync"
    ) -> None:
        for step in range(begin, end):
            self.optimizer.zero_grad()
            for part in range(micro):
                getattr(self.model, accumulate)(part == micro - 1)
                inputs, labels = batch(step * micro + part, self.rank)
                nn.functional.cross_entropy(self.model(inputs), labels % 3).backward()
            self.optimizer.step()

    def shown(self) -> dict[str, Tensor]:
        """The whole model, as the parameters hold it."""
        return full(self.model)

    def all_of_it(self) -> dict[str, Tensor]:
        """All that this rank goes on from."""
        out = dict(self.sync.state_dict())
        for number, memory in enumerate(self.optimizer.state.values()):
            for key, each in memory.items():
                out[f"optimizer/{number}/{key}"] = local(each)
        return {key: each.clone() for key, each in out.items()}

    def evaluated(self) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            out = self.model(batch(0, 99)[0])
        self.model.train()
        return out


def full(model: FSDPModule) -> dict[str, Tensor]:
    assert isinstance(model, nn.Module)
    return {name: each.full_tensor().detach().clone() for name, each in model.state_dict().items()}


def local(each: Any) -> Any:
    return getattr(each, "_local_tensor", each)


def plain(state: dict[str, Tensor]) -> Tensor:
    """What a plain model of these weights says."""
    model = Odd()
    model.load_state_dict(state)
    with torch.no_grad():
        return model(batch(0, 99)[0])


def whole_training(rank: int, steps: int, **settings: Any) -> dict[str, dict[str, Tensor]]:
    """With whole numbers for gradients, so that sums are exact: what was fed, shown before and after the
    flush."""
    mesh = mesh_of(2, 2)
    model = fully_shard(Whole(SHAPES), mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    sync = gradsieve.attach(model, optimizer, replicate=mesh["replicate"], **repeatable(settings))
    fix_preview(sync.pipeline, 1.0)
    fed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in _names()}
    for step in range(steps):
        gradients = whole_numbers(SHAPES, step, rank)
        for total, gradient in zip(fed.values(), gradients, strict=True):
            total += gradient.double()
        optimizer.zero_grad()
        model(gradients).backward()
        optimizer.step()
    sync.verify()
    shown, waits = full(model), any(bool(each.any()) for each in sync.pipeline.residuals())
    sync.flush()
    assert sync.pipeline.step == steps + 1
    return {"fed": fed, "shown": shown, "flushed": full(model), "waits": {"any": torch.tensor(waits)}}


def _names() -> list[tuple[str, tuple[int, ...]]]:
    return [(f"tensors.{place}", shape) for place, shape in enumerate(SHAPES)]
