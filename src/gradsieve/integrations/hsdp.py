"""`attach(model, optimizer, replicate=mesh["replicate"])`: FSDP2 inside a host, sparse between hosts.

    mesh = init_device_mesh("cuda", (hosts, ranks_a_host), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])

FSDP averages gradients among the shards of one host, and the optimizer steps this rank's shards. What they
moved is exchanged with the ranks that hold the same shards on other hosts, the replicate group: to the
engine they are a model, and that group is the world. Ranks of one host exchange nothing here, and need not
agree on how much is sent. A "rank" in messages of a sync is the number of the host, its place in `replicate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gradsieve.errors import ConfigError
from gradsieve.integrations.model_sync import ModelSync
from gradsieve.integrations.shards import ShardedModels, Shards
from gradsieve.integrations.two_models import TwoModels
from gradsieve.integrations.wrappers import model_in
from gradsieve.presets import choose, choose_scheme
from gradsieve.sync import StepPipeline


class HsdpSync(ModelSync):
    """A GradientSync of this rank's shards, between the hosts."""

    hears_first: ClassVar[bool] = True  # FSDP's own hook gathers the parameters

    def __init__(self, model: nn.Module, optimizer: Any, replicate: DeviceMesh, **settings: Any) -> None:
        model = model_in(model)
        group = _group_of(model, replicate)
        _refuse_gradients(settings)
        self.shards = Shards(model)
        if self.shards.has_listener:
            raise ConfigError(
                "the model has an all-reduce hook already, or a sync: close() it, or leave out "
                "set_all_reduce_hook()"
            )
        _refuse_crooked(self.shards, group)
        held = {name: part.held for name, part in self.shards.parts.items()}
        super().__init__(
            model, [*held.items(), *self.shards.frozen.items()], optimizer, group=group, **settings
        )

    def parts_of(self, held: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: part.local for name, part in self.shards.parts.items()}

    def two_models(self, pipeline: StepPipeline) -> TwoModels:
        return ShardedModels(self.shards, pipeline)

    def enter(self) -> None:
        """Also to FSDP."""
        super().enter()
        self.shards.listen(self.belongs_to_a_backward)

    def leave(self) -> None:
        self.shards.listen(None)
        super().leave()

    # -- a step -----------------------------------------------------------------------------------------

    def before_update(self, names: Set[str], optimizer: Any) -> None:
        """The shards' gradients, for as long as that is their business."""
        for name in names:
            part = self.shards.parts[name]
            part.local.grad = None if part.held.grad is None else _local(part.held.grad)
        super().before_update(names, optimizer)
        for name in names:
            part = self.shards.parts[name]
            if part.local.grad is None:
                part.held.grad = None
            part.local.grad = None

    def are_finite(self, gradients: Sequence[Tensor]) -> bool:
        """On all shards of this host, or it would take a part of a step."""
        good = torch.tensor([super().are_finite(gradients)], dtype=torch.int32, device=self.device)
        dist.all_reduce(good, dist.ReduceOp.MIN, group=self.shards.group)
        return bool(good)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_` would clip the mean of all hosts' gradients, over all shards:
        call it on all of them, before the optimizer's step. Returns the norm of that mean."""
        assert isinstance(self.pipeline, StepPipeline)
        rho = torch.tensor([self.pipeline.rho], dtype=torch.float64, device=self.device)
        dist.all_reduce(rho, group=self.shards.group)
        shorter = float(rho / self.shards.count) ** 0.5  # each shard has measured its own
        norm = torch.nn.utils.clip_grad_norm_(self.held.values(), max_norm / shorter)
        whole: Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return whole * shorter


def _local(gradient: Tensor) -> Tensor:
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _group_of(model: nn.Module, replicate: DeviceMesh) -> dist.ProcessGroup:
    if not isinstance(model, FSDPModule):
        raise ConfigError(
            f"replicate= is for a model that fully_shard() was applied to, not {type(model).__name__}: first "
            "fully_shard(model, mesh=mesh['shard']), on the whole model after its parts. In the place of "
            "DistributedDataParallel, with reshard_after_forward=False: docs/hsdp.md"
        )
    if not isinstance(replicate, DeviceMesh) or replicate.ndim != 1:
        of = (
            f"of {replicate.ndim} dimensions"
            if isinstance(replicate, DeviceMesh)
            else type(replicate).__name__
        )
        raise ConfigError(
            f"replicate= is the axis that is exchanged over, mesh['replicate'], not a mesh {of}"
        )
    if replicate.size() == 1:
        raise ConfigError(
            "the replicate axis has one rank, so that there is nothing to exchange: leave out attach(). What "
            "waits in a checkpoint of more hosts goes into the model by add_what_waits(): docs/hsdp.md"
        )
    return replicate.get_group()


def _refuse_crooked(shards: Shards, group: dist.ProcessGroup) -> None:
    both = set(dist.get_process_group_ranks(group)) & set(dist.get_process_group_ranks(shards.group))
    if both != {dist.get_rank()}:
        raise ConfigError(
            f"ranks {sorted(both)} hold different shards of one model and would exchange them: replicate= has "
            "to be the other axis of the mesh whose shard axis fully_shard() was given"
        )


def _refuse_gradients(settings: Mapping[str, Any]) -> None:
    preset, every = settings.get("preset", "default"), settings.get("every", 1)
    scheme = choose_scheme(settings.get("scheme"), settings.get("density"), settings.get("bits"), preset)
    treatment = choose(preset, scheme, every)
    if treatment.exchange != "steps" or (scheme.lossless and treatment.every == 1):
        raise ConfigError(
            "with replicate= steps are exchanged, not gradients (preset='paper', exchange='gradients', a dense "
            "scheme): for dense averaging give fully_shard() the whole mesh, and leave out attach()"
        )
