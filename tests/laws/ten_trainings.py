"""Ten trainings of 60 steps on four virtual ranks, behind DDP, as digests of the models they end with.

Gradients are formed element by element, so that no library's order of summation is in them. Run it by
`python scripts/ten_trainings.py`, which fixes the instruction set that torch and numba compile for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve import schemes
from laws.stepping_ranks import take_seat
from laws.virtual_engine import Room

WORLD, STEPS = 4, 60
SHAPES = {"table": (211, 9), "first": (53, 37), "scale": (37,), "second": (31, 64), "head": (5,)}

SCHEMES: dict[str, Callable[[], dict[str, Any]]] = {
    "stripes in 0.75 bits": lambda: {"bits": 0.75},
    "stripes in 4 bits": lambda: {"bits": 4},
    "exdyna": lambda: {"scheme": "exdyna", "density": 0.01},
    "oktopk": lambda: {"scheme": "oktopk", "density": 0.01},
    "spardl": lambda: {"scheme": "spardl", "density": 0.01},
}
"""With steps, by what `attach` is given."""
AS_GRADIENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "stripes in 0.75 bits": lambda: {"scheme": schemes.Stripes(density=0.3)},
    "stripes in 4 bits": lambda: {"scheme": schemes.Stripes(density=1.0, values="int4")},
}
"""With gradients, where budgets of few bits are refused."""


class Quadratic(nn.Module):
    """Half of a weighted distance to a target that moves from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(5)
        for name, shape in SHAPES.items():
            start = torch.rand(shape, generator=source) - 0.5
            self.register_parameter(name, nn.Parameter(start))

    def forward(self, targets: dict[str, Tensor]) -> Tensor:
        losses = [(p - targets[name]).square().sum() for name, p in self.named_parameters()]
        return torch.stack(losses).sum()


def batch(rank: int, step: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(1009 * step + rank)
    return {name: torch.rand(shape, generator=source) for name, shape in SHAPES.items()}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2.0**-8, weight_decay=0.01)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=2.0**-8, momentum=0.9)


def train(optimizer: Callable[[Any], torch.optim.Optimizer], settings: Callable[[], dict[str, Any]]) -> str:
    """Of rank 0's parameters and, if steps are exchanged, of what all ranks' flush adds to them."""
    room = Room(WORLD)

    def make(rank: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Any]:
        take_seat(room, rank)
        ddp = DistributedDataParallel(Quadratic(), bucket_cap_mb=0.01)
        stepper = optimizer(ddp.parameters())
        return ddp, stepper, gradsieve.attach(ddp, stepper, **settings())

    ranks = room.everyone(make)
    digest = hashlib.sha256()

    def step(rank: int, number: int) -> None:
        ddp, stepper, _ = ranks[rank]
        stepper.zero_grad()
        ddp(batch(rank, number)).backward()
        stepper.step()

    def show() -> None:
        shown = [torch.cat([p.detach().flatten() for p in ddp.module.parameters()]) for ddp, *_ in ranks]
        assert all(torch.equal(shown[0], other) for other in shown[1:]), "ranks show different models"
        digest.update(shown[0].numpy().tobytes())

    try:
        for number in range(STEPS):
            room.everyone(lambda rank, number=number: step(rank, number))
        show()
        if ranks[0][2].pipeline.exchanges_steps:
            room.everyone(lambda rank: ranks[rank][2].flush())
            show()
        for *_, sync in ranks:
            sync.close()
    finally:
        room.close()
    return digest.hexdigest()[:16]


def digests() -> dict[str, str]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from gradsieve import kernels
    from laws.stepping_ranks import virtual

    kernels.active()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with virtual():
            steps = {f"steps, {name}": train(adamw, settings) for name, settings in SCHEMES.items()}
            gradients = {}
            for name, settings in SCHEMES.items():
                chosen = AS_GRADIENTS.get(name, settings)
                gradients[f"gradients, {name}"] = train(
                    momentum, lambda chosen=chosen: {**chosen(), "exchange": gradsieve.Gradients()}
                )
        return steps | gradients
    finally:
        dist.destroy_process_group()
