"""P virtual ranks with real syncs and optimizers, without DDP, whose checkpoints others can take over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsieve
from gradsieve import kernels
from gradsieve.pipeline import StepPipeline
from laws.stepping_ranks import take_seat, virtual
from laws.virtual_engine import PATIENCE, Room
from repeatable import repeatable

SHAPES = {"first": (6, 8), "bias": (5,), "last": (4, 9)}
ELEMENTS = 48 + 5 + 36


@contextmanager
def no_network() -> Iterator[None]:
    """Syncs ask for a process group; nothing travels on it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    kernels.active()  # loaded here, and not while ranks wait for each other
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with virtual():
        yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def fake_group() -> Iterator[None]:
    with no_network():
        yield


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=2.0**-4, momentum=0.5)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2.0**-6)


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(5)
        for name, shape in SHAPES.items():
            start = torch.randint(-8, 9, shape, generator=source) / 8
            self.register_parameter(name, nn.Parameter(start.to(dtype)))


class Hand:
    """One rank."""

    def __init__(
        self, room: Room, rank: int, optimizer: Callable[[Any], Any], settings: dict[str, Any]
    ) -> None:
        self.rank, self.model = rank, Small(settings.pop("dtype", torch.float32))
        self.optimizer = optimizer(self.model.parameters())
        take_seat(room, rank)
        self.sync = gradsieve.GradientSync(
            self.model.named_parameters(),
            self.optimizer,
            bucket_cap_mb=0.0002,
            **repeatable(settings),
        )

    def step(self, number: int) -> None:
        source = torch.Generator().manual_seed(1009 * number + self.rank)
        for parameter in self.model.parameters():
            drawn = torch.randint(-8, 9, parameter.shape, generator=source) / 8
            parameter.grad = drawn.to(parameter.dtype)
        if self.sync.reduce():
            self.optimizer.step()

    def memory(self, kind: str) -> Tensor:
        """All vectors of one kind, end to end."""
        kept = self.sync.pipeline.kept()
        return torch.cat([kept[f"{kind}/{name}"] for name in SHAPES if f"{kind}/{name}" in kept]).double()

    def waiting(self) -> Tensor:
        if isinstance(self.sync.pipeline, StepPipeline):
            return self.memory("mark") - self.memory("own")
        return self.memory("residual")

    def all(self) -> dict[str, Tensor]:
        """All that a step may change here."""
        out = {f"parameter/{name}": p.detach().clone() for name, p in self.model.named_parameters()}
        for number, memory in enumerate(self.optimizer.state.values()):
            out |= {f"optimizer/{number}/{k}": v.clone() for k, v in memory.items() if isinstance(v, Tensor)}
        return out | self.sync.state_dict()


class Crew:
    def __init__(self, world: int, optimizer: Callable[[Any], Any] = sgd, **settings: Any) -> None:
        self.world, self.room, self.steps = world, Room(world), 0
        self.hands: list[Hand] = self.room.everyone(
            lambda rank: Hand(self.room, rank, optimizer, dict(settings))
        )

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for hand in self.hands:
            hand.sync.close()
        self.room.close()

    def train(self, begin: int, end: int) -> Crew:
        for number in range(begin, end):
            self.room.everyone(lambda rank, number=number: self.hands[rank].step(number))  # type: ignore[misc]
        return self

    def everyone(self, call: Callable[[Hand], Any]) -> list[Any]:
        return self.room.everyone(lambda rank: call(self.hands[rank]))

    def errors(self, call: Callable[[Hand], Any]) -> list[BaseException | None]:
        """What each rank raised."""
        return [
            future.exception(timeout=PATIENCE)
            for future in self.room.all_of(lambda rank: call(self.hands[rank]))
        ]

    def states(self) -> dict[str, Tensor]:
        """Of all ranks, in one."""
        return {key: part for hand in self.hands for key, part in hand.sync.state_dict().items()}

    def load(self, states: Mapping[str, Tensor]) -> Crew:
        self.everyone(lambda hand: hand.sync.load_state_dict(states))
        return self

    def waits(self) -> Tensor:
        """On all ranks, as the shared model will move by it."""
        return torch.stack([hand.waiting() for hand in self.hands]).sum(0) / self.world
