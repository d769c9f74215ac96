"""Trainings that take a device: what a user does from the first step to a resumed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from accelerator import device as fake
from accelerator.faults import FAULTS
from accelerator.recorder import recording
from gradsieve import kernels, models
from gradsieve.kernels.torch_passes import select_without_waiting
from gradsieve.schemes import exclusive
from multiproc.models import Mlp, batch
from multiproc.sharded import sharded
from repeatable import repeatable

BEFORE, AFTER = 3, 2
"""Steps before and after a checkpoint."""


def device_called(name: str, library: Path) -> torch.device:
    """The fake device is loaded in either case: autograd counts devices once, in the first backward."""
    loaded = fake.load(library)
    return torch.device("cpu") if name == "cpu" else loaded


def group_for(device: torch.device) -> dist.ProcessGroup | None:
    """As a user has it: gloo for the CPU, the device's own backend for the device."""
    return None if device.type == "cpu" else dist.new_group(backend=fake.BACKEND)


@contextmanager
def kernels_of_a_device() -> Iterator[None]:
    """Also on the CPU: torch's kernels, and the selection that does not wait, which adds up another list."""
    with (
        kernels.using("torch"),
        mock.patch.object(exclusive, "select", select_without_waiting),
        mock.patch.object(models, "select", select_without_waiting),
    ):
        yield


class Training:
    """Through DistributedDataParallel."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None, **settings: Any) -> None:
        self.device, self.rank = device, dist.get_rank()
        self.model: nn.Module = DistributedDataParallel(
            Mlp().to(device), process_group=group, bucket_cap_mb=0.02
        )
        # Not `foreach`, which is torch's default on a device and not on the CPU.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.sync: Any = gradsieve.attach(self.model, self.optimizer, **repeatable(settings))

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            self.optimizer.zero_grad()
            inputs, labels = (each.to(self.device) for each in batch(step, self.rank))
            nn.functional.cross_entropy(self.model(inputs), labels).backward()
            self.after_backward()
            self.optimizer.step()

    def after_backward(self) -> None:
        """For who has to do something then."""

    def evaluate(self) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            said = self.model(batch(0, 99)[0].to(self.device))
        self.model.train()
        return said.cpu()

    def save(self, folder: Path) -> None:
        """As users do: the sync saves residuals and the optimizer, and with steps both models."""
        self.sync.save(folder / "sync")
        torch.save(self.model.state_dict(), folder / f"model{self.rank}.pt")

    def load(self, folder: Path) -> None:
        stored = torch.load(folder / f"model{self.rank}.pt", map_location="cpu", weights_only=True)
        self.model.load_state_dict(stored)
        self.sync.load(folder / "sync")

    def bits(self) -> dict[str, Tensor]:
        """All that this rank goes on from."""
        out = {f"model/{name}": each for name, each in self.model.state_dict().items()}
        out |= {f"sync/{name}": each for name, each in self.sync.state_dict().items()}
        for number, memory in enumerate(self.optimizer.state.values()):
            out |= {f"optimizer/{number}/{name}": each for name, each in memory.items()}
        return {name: _plain(each).detach().cpu().clone() for name, each in out.items()}


class ShardedTraining(Training):
    """Through `fully_shard`, of two hosts with two ranks each."""

    def __init__(self, device: torch.device, mesh: DeviceMesh) -> None:
        self.device, self.rank = device, dist.get_rank()
        self.model = sharded(Mlp().to(device), mesh["shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.sync = gradsieve.attach(self.model, self.optimizer, replicate=mesh["replicate"], bits=0.75)

    def save(self, folder: Path) -> None:
        self.sync.save(folder)

    def load(self, folder: Path) -> None:
        self.sync.load(folder)


class PlainTraining(Training):
    """Without DistributedDataParallel, in a loop that calls the sync."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.device, self.rank = device, dist.get_rank()
        self.model = Mlp().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.sync = gradsieve.GradientSync(
            self.model.named_parameters(), self.optimizer, group=group, bits=0.75
        )

    def after_backward(self) -> None:
        self.sync.reduce()

    def evaluate(self) -> Tensor:
        with self.sync.shared_model():
            return super().evaluate()


def mesh_for(device: torch.device) -> DeviceMesh:
    names = ("replicate", "shard")
    backend = "gloo" if device.type == "cpu" else fake.BACKEND
    return init_device_mesh(
        device.type, (2, 2), mesh_dim_names=names, backend_override=dict.fromkeys(names, backend)
    )


def life(make: Callable[[], Training], folder: Path) -> dict[str, Tensor]:
    """Train, evaluate, save, train on; once more from the checkpoint; all of it flushed at the end."""
    folder.mkdir(exist_ok=True)
    first = make()
    first.train(0, BEFORE)
    seen = {"evaluated": first.evaluate()}
    first.save(folder)
    first.train(BEFORE, BEFORE + AFTER)
    seen |= {f"trained/{name}": each for name, each in first.bits().items()}
    first.sync.close()
    second = make()
    second.load(folder)
    second.train(BEFORE, BEFORE + AFTER)
    seen |= {f"resumed/{name}": each for name, each in second.bits().items()}
    second.sync.verify()
    second.sync.flush()
    seen |= {f"flushed/{name}": each for name, each in second.bits().items()}
    second.sync.close()
    return seen


def _plain(each: Any) -> Tensor:
    return torch.as_tensor(getattr(each, "_local_tensor", each))


def ddp_life(
    rank: int, name: str, library: Path, folder: Path, settings: dict[str, Any]
) -> dict[str, Tensor]:
    device = device_called(name, library)
    group = group_for(device)
    with kernels_of_a_device():
        return life(lambda: Training(device, group, **settings), folder / name)


def hsdp_life(rank: int, name: str, library: Path, folder: Path) -> dict[str, Tensor]:
    device = device_called(name, library)
    mesh = mesh_for(device)
    with kernels_of_a_device():
        return life(lambda: ShardedTraining(device, mesh), folder / name)


def plain_life(rank: int, name: str, library: Path, folder: Path) -> dict[str, Tensor]:
    device = device_called(name, library)
    group = group_for(device)
    with kernels_of_a_device():
        return life(lambda: PlainTraining(device, group), folder / name)


def mixing_life(rank: int, library: Path, folder: Path) -> None:
    """With a fault planted: what is counted with lies on the CPU, whatever device was asked for."""
    count = torch.arange

    def on_cpu(*args: Any, **kwargs: Any) -> Tensor:
        return count(*args, **{**kwargs, "device": "cpu"})

    with mock.patch.object(torch, "arange", on_cpu):
        ddp_life(rank, "fake", library, folder, {"density": 0.05})


def recorded_life(
    rank: int, library: Path, folder: Path, settings: dict[str, Any], fault: str | None = None
) -> tuple[int, list[str]]:
    """How many pieces of work the detector saw, and the races."""
    device = device_called("fake", library)
    group = group_for(device)
    return recorded(device, lambda: life(lambda: Training(device, group, **settings), folder), fault)


def recorded_hsdp_life(
    rank: int, library: Path, folder: Path, fault: str | None = None
) -> tuple[int, list[str]]:
    device = device_called("fake", library)
    mesh = mesh_for(device)
    return recorded(device, lambda: life(lambda: ShardedTraining(device, mesh), folder), fault)


def recorded(device: torch.device, live: Callable[[], Any], fault: str | None) -> tuple[int, list[str]]:
    # On a stream of the user's own: on the default one a forgotten stream would not show.
    planted = FAULTS[fault] if fault else nullcontext
    with kernels_of_a_device(), torch.Stream(device), recording() as detector, planted():
        live()
    return detector.pieces, detector.races
