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
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
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
from gradsieve.attached import Attached, Handle
from gradsieve.errors import ConfigError
from gradsieve.hooks import ModuleHook, register_hooks
from gradsieve.pipeline.budget import Budget
from gradsieve.pipeline.exchange_settings import Steps, choose_exchange, choose_scheme
from gradsieve.ranks_alike import as_bytes, as_text
from gradsieve.runner import Runner
from gradsieve.shards import ShardedModels, ShardedReplica, Shards
from gradsieve.sync import GradientSync


class ShardedRunner(Runner):
    """A runner whose optimizers step shards: those of one host skip a step together."""

    replica: ShardedReplica
    _host_has_notice = False

    def before_update(self, names: Set[str], optimizer: Any) -> None:
        """Prepare a step. The shards have plain gradients only while they are checked; those of a skipped
        step go."""
        parts = [self.replica.shards.parts[name] for name in names]
        for part in parts:
            part.local.grad = None if part.held.grad is None else torch_names.plain_part_of(part.held.grad)
        super().before_update(names, optimizer)
        for part in parts:
            if part.local.grad is None:
                part.held.grad = None
            part.local.grad = None

    def are_finite(self, gradients: Sequence[Tensor]) -> bool:
        """Ask all shards of this host, which would otherwise take a part of a step. They also agree on
        whether the host has a notice, which all of them send to other hosts in the same exchange."""
        budget = self.pipeline.budget or Budget(1.0)
        mine = [not super().are_finite(gradients), super().has_notice, -budget.bits, budget.every]
        most = torch.tensor(mine, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.replica.shards.group)
        some_are_not, noticed, bits, every = most.tolist()
        if self.pipeline.timer is not None and budget.is_chosen:
            self.pipeline.follow(replace(budget, bits=-bits, every=int(every)))  # alike on all shards
        self._host_has_notice |= bool(noticed)
        return not some_are_not

    @property
    def has_notice(self) -> bool:
        return self._host_has_notice


class HsdpSync(GradientSync):
    """A GradientSync that exchanges this rank's shards between hosts."""

    runner_type: ClassVar[type[Runner]] = ShardedRunner
    replica: ShardedReplica

    def __init__(self, model: nn.Module, optimizer: Any, replicate: DeviceMesh, **settings: Any) -> None:
        model, group = _fit(model, replicate)
        _refuse_gradients(settings)
        self._shards = shards = Shards(model)
        shards.refuse_exchange_over(group)
        # Weak: the model's hooks hold their listener, and the collector cannot see through all of them.
        self._register = partial(_register, weakref.ref(model))
        held = {name: part.held for name, part in shards.parts.items()}
        super().__init__([*held.items(), *shards.frozen.items()], optimizer, group=group, **settings)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_` would clip the mean of all hosts' gradients, over all
        shards: call it on all of them, before the optimizer's step. Returns the norm of that mean."""
        shards = self.replica.shards
        rho = torch.tensor([self.pipeline.rho], dtype=torch.float64, device=self.replica.device)
        dist.all_reduce(rho, group=shards.group)
        shorter = float(rho / shards.count) ** 0.5  # each shard has measured its own
        norm = torch.nn.utils.clip_grad_norm_(self.replica.held.values(), max_norm / shorter)
        return torch.mul(norm.full_tensor() if isinstance(norm, DTensor) else norm, shorter)


def _register(reference: weakref.ref[nn.Module], attached: Attached) -> Iterator[Handle]:
    model, models = reference(), attached.models
    assert model is not None
    assert isinstance(models, ShardedModels)
    # FSDP's own hook gathers the parameters: before it, the model that they are gathered of is shown.
    yield model.register_forward_pre_hook(ModuleHook(lambda *_: models.before_gathering()), prepend=True)
    yield from register_hooks(model, attached, first=True)
    shards = models.shards
    shards.listen(attached.averaged)
    yield shards


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
    in a model that is sharded over one host, or over all, and goes on without a sync. Call it on all ranks:
    they do not vote. Optimizers are not touched."""
    from gradsieve.checkpoint import files  # here: a training that saves nothing loads no checkpoint code

    shards = Shards(torch_names.without_compile(model))
    with torch.no_grad():
        held = {name: part.held for name, part in shards.parts.items()}
        for name, complete in files.complete_model(Path(folder), held, shards.rank, shards.count).items():
            torch_names.plain_part_of(shards.parts[name].held).copy_(complete)


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
