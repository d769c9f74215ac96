"""`Replica`: what one rank of a group trains and exchanges.

A `GradientSync` makes one and drives it. Whatever else works on a rank's state (comparing replicas,
saving and loading, the startup log, metrics) takes the replica, and so needs no sync.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm.engine import Engine
from gradsieve.pipeline import GradientPipeline, StepPipeline
from gradsieve.pipeline.budget import Budget
from gradsieve.pipeline.exchange_settings import Exchange
from gradsieve.pipeline.optimizer_adapter import OptimizerAdapter
from gradsieve.replica.parameter_views import SingleModel
from gradsieve.schemes.base import Scheme


@dataclass(slots=True, eq=False)
class Replica:
    engine: Engine
    held: Mapping[str, Tensor]
    """By name, what the user and the optimizers have."""
    adapter: OptimizerAdapter
    views: SingleModel
    """Which model the parameters hold at the moment."""
    fixed: Budget | None = None
    """The budget, if the user gave one."""
    part: str = ""
    """For names of files: of which part of the model, where ranks hold parts."""
    is_elastic: bool = False
    """Whether ranks may come and go, so that they need not start with the same learning rates."""
    compared: int = 0
    """The step after which replicas were last compared."""
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    # By folder, the fencing token of the last checkpoint that this run saved there: `checkpoint/fencing.py`.

    @property
    def pipeline(self) -> GradientPipeline | StepPipeline:
        return self.adapter.pipeline

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """By name, what is exchanged: `held`, or this rank's shard of it."""
        return self.adapter.parameters

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self.adapter.optimizers

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
        """For messages."""
        return f"rank {self.rank}, step {self.pipeline.step}"

    @property
    def shard(self) -> int:
        return 0

    @property
    def shards_of_host(self) -> int:
        """How many parts the model is cut into, of which each rank of a host has one."""
        return 1

    def of_all_shards(self, row: Tensor) -> Tensor:
        """This row of every shard of this host."""
        return row.unsqueeze(0)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As it is saved, in tensors of this rank's own."""
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def set_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)
