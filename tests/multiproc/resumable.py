"""A model that learns in real processes, and can be saved and go on in others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from multiproc.models import Mlp, batch
from multiproc.training import snapshot
from repeatable import repeatable


class Resumable:
    def __init__(self, rank: int, optimizer: Callable[..., torch.optim.Optimizer], **settings: Any) -> None:
        self.rank, self.model = rank, Mlp()
        self.optimizer = optimizer(self.model.parameters())
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.01)
        self.sync = gradsieve.attach(self.ddp, self.optimizer, **repeatable(settings))

    def train(self, begin: int, end: int) -> dict[str, Tensor]:
        for step in range(begin, end):
            self.step(step)
        return snapshot(self)

    def step(self, step: int) -> None:
        inputs, labels = batch(step, self.rank)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.ddp(inputs), labels).backward()
        self.optimizer.step()

    def save(self, path: Path) -> None:
        parts = {"model": self.model, "optimizer": self.optimizer, "sync": self.sync}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)

    def load(self, path: Path, with_sync: bool) -> None:
        stored = torch.load(path, weights_only=True)
        self.model.load_state_dict(stored["model"])
        self.optimizer.load_state_dict(stored["optimizer"])
        if with_sync:
            self.sync.load_state_dict(stored["sync"])
