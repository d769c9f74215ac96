"""What one rank of a group trains and exchanges.

A `GradientSync` makes a `Replica` and drives it. All that works on a rank's state (comparing replicas, saving
and loading, the startup log, metrics) takes the replica, and needs no sync.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm.engine import Engine
from gradsieve.models import Models
from gradsieve.pipeline import Pipeline
from gradsieve.pipeline.budget import Budget
from gradsieve.pipeline.exchange_settings import Exchange
from gradsieve.schemes.base import Scheme


@dataclass(slots=True, eq=False)
class Replica:
    engine: Engine
    held: Mapping[str, Tensor]  # by name, what the user and the optimizers have
    pipeline: Pipeline
    fixed: Budget | None = None  # the budget, if the user gave one
    part: str = ""  # for names of files: of which part of the model, if ranks hold parts
    is_elastic: bool = False  # whether ranks may come and go: they may start with other learning rates
    compared: int = 0  # the step after which replicas were last compared
    # By folder, the fencing token of the last checkpoint that this run saved there: `checkpoint/fencing.py`.
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def models(self) -> Models:
        return self.pipeline.models

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Return by name what is exchanged: `held`, or this rank's shard of it."""
        return self.pipeline.parameters

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self.pipeline.optimizers

    @property
    def scheme(self) -> Scheme[Any]:
        return self.pipeline.scheme

    @property
    def settings(self) -> Exchange:
        return self.pipeline.settings

    @property
    def rank(self) -> int:
        return self.engine.rank

    @property
    def world(self) -> int:
        return self.engine.world

    @property
    def device(self) -> torch.device:
        return self.pipeline.units[0].device

    @property
    def where(self) -> str:
        """Return rank and step, for messages."""
        return f"rank {self.rank}, step {self.pipeline.step}"

    @property
    def shard(self) -> int:
        return 0

    @property
    def shards_of_host(self) -> int:
        """Return how many parts the model is cut into, one for each rank of a host."""
        return 1

    def of_all_shards(self, row: Tensor) -> Tensor:
        """Return this row of every shard of this host."""
        return row.unsqueeze(0)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state as it is saved, in tensors of this rank's own."""
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def set_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)
