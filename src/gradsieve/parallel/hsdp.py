"""`attach(model, optimizer, replicate=mesh["replicate"])`: FSDP2 inside a host, sparse between hosts.

    mesh = init_device_mesh("cuda", (hosts, ranks_a_host), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])

FSDP averages gradients among the shards of one host, and the optimizer steps this rank's shards. Their steps
are exchanged with the ranks that hold the same shards on other hosts, the replicate group: to the engine the
shards are a model, and that group is the world. Ranks of one host exchange nothing here. A "rank" in messages
of a sync is the number of the host, its place in `replicate`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gradsieve import torch_names
from gradsieve.comm.engine import Engine
from gradsieve.errors import ConfigError
from gradsieve.parallel.attached import Attached
from gradsieve.pipeline import Pipeline
from gradsieve.pipeline.budget import Budget
from gradsieve.pipeline.exchange_settings import Steps, choose_exchange, choose_scheme
from gradsieve.ranks_alike import as_bytes, as_text
from gradsieve.shards import ShardedModels, ShardedReplica, Shards
from gradsieve.units import Unit


class HsdpSync(Attached):
    """A GradientSync that exchanges this rank's shards between hosts."""

    replica: ShardedReplica
    _models: ShardedModels
    hears_first: ClassVar[bool] = True  # FSDP's own hook gathers the parameters
    _host_has_notice = False

    def __init__(self, model: nn.Module, optimizer: Any, replicate: DeviceMesh, **settings: Any) -> None:
        model, group = _fit(model, replicate)
        _refuse_gradients(settings)
        self.shards = Shards(model)
        self.shards.refuse_exchange_over(group)
        held = {name: part.held for name, part in self.shards.parts.items()}
        super().__init__(
            model, [*held.items(), *self.shards.frozen.items()], optimizer, group=group, **settings
        )

    def parts_of(self, held: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: part.local for name, part in self.shards.parts.items()}

    def make_replica(
        self, engine: Engine, held: Mapping[str, Tensor], pipeline: Pipeline, fixed: Budget | None
    ) -> ShardedReplica:
        part = f".shard{self.shards.rank}"
        return ShardedReplica(engine, held, pipeline, fixed, part, shards=self.shards)

    def make_models(self, parameters: Mapping[str, Tensor], units: Sequence[Unit]) -> ShardedModels:
        self._models = ShardedModels(self.shards, parameters, units)
        return self._models

    def enter(self) -> None:
        super().enter()
        self.shards.listen(self.averaged)

    def leave(self) -> None:
        self.shards.listen(None)
        super().leave()

    # -- a step -----------------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module) -> None:
        super().before_forward(module)
        self._models.before_gathering()

    def before_update(self, names: Set[str], optimizer: Any) -> None:
        """The shards have plain gradients only while they are checked; those of a skipped step go."""
        parts = [self.shards.parts[name] for name in names]
        for part in parts:
            part.local.grad = None if part.held.grad is None else torch_names.plain_part_of(part.held.grad)
        super().before_update(names, optimizer)
        for part in parts:
            if part.local.grad is None:
                part.held.grad = None
            part.local.grad = None

    def are_finite(self, gradients: Sequence[Tensor]) -> bool:
        """Asked of all shards of this host, or it would take a part of a step. A notice to one shard is one
        to the host: all its shards send it to other hosts, in the same exchange."""
        budget = self.pipeline.budget or Budget(1.0)
        mine = [not super().are_finite(gradients), super()._has_notice, -budget.bits, budget.every]
        most = torch.tensor(mine, dtype=torch.float64, device=self.replica.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.shards.group)
        some_are_not, noticed, bits, every = most.tolist()
        if self.pipeline.timer is not None and budget.is_chosen:
            self.pipeline.follow(replace(budget, bits=-bits, every=int(every)))  # alike on all shards
        self._host_has_notice |= bool(noticed)
        return not some_are_not

    @property
    def _has_notice(self) -> bool:
        return self._host_has_notice

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_` would clip the mean of all hosts' gradients, over all shards:
        call it on all of them, before the optimizer's step. Returns the norm of that mean."""
        rho = torch.tensor([self.pipeline.rho], dtype=torch.float64, device=self.replica.device)
        dist.all_reduce(rho, group=self.shards.group)
        shorter = float(rho / self.shards.count) ** 0.5  # each shard has measured its own
        norm = torch.nn.utils.clip_grad_norm_(self.held.values(), max_norm / shorter)
        return torch.mul(norm.full_tensor() if isinstance(norm, DTensor) else norm, shorter)


def host_mesh(device_type: str = "cuda") -> DeviceMesh:
    """Return all ranks as a mesh with the axes "replicate", from host to host, and "shard", inside a host.
    Call it on all ranks. Ranks share a host if its name and, under torchrun, the number of their node are
    the same."""
    if not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialised: call init_process_group() first")
    here = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"
    device = torch.device("cpu") if device_type == "cpu" else torch.accelerator.current_accelerator()
    mine = as_bytes(here, device or torch.device("cpu"))
    rows = mine.new_empty((dist.get_world_size(), mine.numel()))
    torch_names.all_gather_flat(rows.view(-1), mine, None)
    return DeviceMesh(
        device_type, by_host([as_text(row) for row in rows]), mesh_dim_names=("replicate", "shard")
    )


def by_host(names: list[str]) -> list[list[int]]:
    """Return the ranks in their order, a row a host."""
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    if len({len(ranks) for ranks in hosts.values()}) > 1:
        some = ", ".join(f"{name.rstrip('/')} {len(ranks)}" for name, ranks in list(hosts.items())[:4])
        raise ConfigError(
            f"hosts have different numbers of ranks ({some}), so that some shards would be on one host only: "
            "start as many on each"
        )
    return list(hosts.values())


def add_residual(model: nn.Module, folder: str | PathLike[str]) -> None:
    """Make the model of a checkpoint that `HsdpSync.save` wrote, of any numbers of hosts and shards, complete
    in a model that is sharded over one host, or over all, and goes on without a sync. Call it on all ranks;
    nobody is asked. Optimizers are not touched."""
    from gradsieve.checkpoint import files  # here: a training that saves nothing loads no checkpoint code

    shards = Shards(torch_names.without_compile(model))
    with torch.no_grad():
        held = {name: part.held for name, part in shards.parts.items()}
        for name, complete in files.complete_model(Path(folder), held, shards.rank, shards.count).items():
            torch_names.local_of(shards.parts[name].held).copy_(complete)


def _fit(model: Any, replicate: DeviceMesh) -> tuple[nn.Module, dist.ProcessGroup]:
    if not isinstance(model, nn.Module) or not isinstance(model, FSDPModule):
        raise ConfigError(
            f"replicate= is for a model that fully_shard() was applied to, not {type(model).__name__}: first "
            "fully_shard(model, mesh=mesh['shard']), on the whole model after its parts. In the place of "
            "DistributedDataParallel, with reshard_after_forward=False: docs/hsdp.md"
        )
    if not isinstance(replicate, DeviceMesh) or replicate.ndim != 1:
        found = f"{replicate.ndim} axes" if isinstance(replicate, DeviceMesh) else type(replicate).__name__
        raise ConfigError(f"replicate= is the axis that is exchanged over, mesh['replicate'], not {found}")
    if replicate.size() == 1:
        raise ConfigError(
            "the replicate axis has one rank, so that there is nothing to exchange: leave out attach(). The "
            "residual in a checkpoint of more hosts goes into the model by add_residual(): docs/hsdp.md"
        )
    return model, replicate.get_group()


def _refuse_gradients(settings: Mapping[str, Any]) -> None:
    exchange = settings.get("exchange")
    scheme = choose_scheme(settings.get("scheme"), settings.get("density"), settings.get("bits"), exchange)
    chosen = choose_exchange(exchange, scheme)
    if not isinstance(chosen, Steps) or (scheme.lossless and chosen.every == 1):
        raise ConfigError(
            "with replicate= steps are exchanged, not gradients (gradsieve.Gradients, published schemes, "
            "dense ones): for dense averaging give fully_shard() the whole mesh, and leave out attach()"
        )
