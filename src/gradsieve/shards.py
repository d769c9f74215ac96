"""A rank's part of a model that `fully_shard` was applied to: plain tensors, and where FSDP reads them.

FSDP gathers a parameter from a flat tensor of its own, as long as the longest shard, which begins with the
parameter's local tensor. So both are pointed to another model together, in memory of that length, and what
FSDP gathered of the model before is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from gradsieve import torch_names
from gradsieve.comm.engine import Engine
from gradsieve.errors import ConfigError
from gradsieve.models import Models
from gradsieve.pipeline import Pipeline
from gradsieve.pipeline.budget import Budget
from gradsieve.replica import Replica
from gradsieve.torch_names import all_gather_flat, plain_part_of, shard_groups_of
from gradsieve.units import Unit, flat_view


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's shard of a parameter."""

    held: DTensor
    local: Tensor
    flat: Tensor  # what FSDP gathers from: the shard, padded to the length of the longest one

    @property
    def is_padded(self) -> bool:
        return self.flat.numel() != self.local.numel()


class Shards:
    """This rank's part of a model that `fully_shard` was applied to."""

    def __init__(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        held = {name: _checked(name, p) for name, p in parameters.items() if p.requires_grad}
        mesh = _mesh_of(held)
        self.frozen: dict[str, Tensor] = {name: p for name, p in parameters.items() if not p.requires_grad}
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.count = mesh.get_local_rank(), mesh.size()
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.give_up_gathered()
        flats = self._flats()
        self.parts = {name: LocalShard(p, plain_part_of(p), flats[p]) for name, p in held.items()}
        for name, part in self.parts.items():
            if part.local.is_meta or type(part.local) is not Tensor:
                raise ConfigError(
                    f"parameter {name!r} has no memory of its own yet: initialise the model before attach()"
                )

    def give_up_gathered(self) -> None:
        for module in self._modules:
            module.reshard()

    def models(self, parameters: Mapping[str, Tensor], units: Sequence[Unit]) -> ShardedModels:
        return ShardedModels(self, parameters, units)

    def replica(
        self, engine: Engine, held: Mapping[str, Tensor], pipeline: Pipeline, fixed: Budget | None
    ) -> ShardedReplica:
        return ShardedReplica(engine, held, pipeline, fixed, f".shard{self.rank}", shards=self)

    @property
    def locals(self) -> dict[str, Tensor]:
        return {name: part.local for name, part in self.parts.items()}

    def remove(self) -> None:
        self.listen(None)

    def listen(self, averaged: Callable[[], None] | None) -> None:
        """Call `averaged` when gradients were averaged among shards and are to be exchanged: not in passes
        that only accumulate (`set_requires_gradient_sync(False)` or `set_requires_all_reduce(False)`)."""
        for group in self._groups():
            torch_names.set_averaging_hook(group, averaged)

    def refuse_exchange_over(self, group: dist.ProcessGroup) -> None:
        """Raise where these shards cannot be exchanged over that group."""
        if any(torch_names.averaging_hook_of(each) is not None for each in self._groups()):
            raise ConfigError(
                "the model has an all-reduce hook already, or a sync: close() it, or leave out "
                "set_all_reduce_hook()"
            )
        both = set(dist.get_process_group_ranks(group)) & set(dist.get_process_group_ranks(self.group))
        if both != {dist.get_rank()}:
            raise ConfigError(
                f"ranks {sorted(both)} hold different shards of one model and would exchange them: "
                "replicate= is the other axis of the mesh whose shard axis fully_shard() was given"
            )

    def _groups(self) -> list[Any]:
        return [group for module in self._modules for group in shard_groups_of(module)]

    def _flats(self) -> dict[Any, Tensor]:
        if any(len(shard_groups_of(module)) > 1 for module in self._modules):
            raise ConfigError(_TWO_MESHES)
        flats: dict[Any, Tensor] = {}
        for group in self._groups():
            if isinstance(group.offload_policy, CPUOffloadPolicy):
                raise ConfigError("parameters that are kept on the host (CPUOffloadPolicy) are not supported")
            flats |= torch_names.shard_flats_of(group)
        return flats


@dataclass(slots=True, eq=False)
class ShardedReplica(Replica):
    """A replica whose ranks are hosts: this rank holds shards of it."""

    shards: Shards = field(kw_only=True)

    @property
    def shard(self) -> int:
        return self.shards.rank

    @property
    def shards_of_host(self) -> int:
        return self.shards.count

    def of_all_shards(self, row: Tensor) -> Tensor:
        rows = row.new_empty((self.shards.count, row.numel()))
        all_gather_flat(rows.view(-1), row, self.shards.group)
        return rows

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state = super(ShardedReplica, self).optimizer_state(optimizer)
        return {**state, "state": _mapped(state["state"], lambda _, value: plain_part_of(value))}

    def set_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        sharded = _mapped(state["state"], lambda index, value: _sharded_like(order[index], value))
        super(ShardedReplica, self).set_optimizer_state(optimizer, {**state, "state": sharded})


class ShardedModels(Models):
    """The models of this rank's shards. FSDP reads the one that they show."""

    def __init__(self, shards: Shards, parameters: Mapping[str, Tensor], units: Sequence[Unit]) -> None:
        super().__init__(parameters, units, {name: part.held for name, part in shards.parts.items()})
        self.shards = shards
        self._gathered_own = False  # which model FSDP's gathered parameters, if there are any, are of
        self._flats: dict[int, Tensor] = {}  # of padded shards, by where the shard begins
        for name, part in shards.parts.items():
            if part.is_padded and part.local.numel():
                memory = torch.zeros_like(part.flat)
                self.show_in(name, memory[: part.local.numel()])
                for flat in (part.flat.data, memory):
                    self._flats[flat.data_ptr()] = flat

    def point(self, name: str, memory: Tensor) -> None:
        part = self.shards.parts[name]
        if not part.local.numel():
            return
        if plain_part_of(part.held) is not part.local:
            raise ConfigError(
                f"parameter {name!r} was replaced after attach() (load_state_dict(assign=True), to(...)): do "
                "it before, or close() and attach again"
            )
        super().point(name, memory)
        part.flat.data = self._flats[memory.data_ptr()] if part.is_padded else flat_view(memory)

    def before_gathering(self) -> None:
        """Parameters gathered of the same model may stay for a forward, where gradients accumulate."""
        if self._gathered_own != self.shows_own:
            self.shards.give_up_gathered()
            self._gathered_own = self.shows_own

    def show_shared(self, names: Iterable[str] | None = None, *, raise_version: bool = True) -> None:
        super().show_shared(names, raise_version=raise_version)
        if raise_version:
            self.shards.give_up_gathered()

    def raise_versions(self) -> None:
        super().raise_versions()
        self.shards.give_up_gathered()

    def point_again(self) -> None:
        super().point_again()
        self.shards.give_up_gathered()


_TWO_MESHES = "parameters are sharded over different meshes: give every fully_shard() mesh['shard']"


def _mesh_of(held: Mapping[str, DTensor]) -> DeviceMesh:
    if not held:
        raise ConfigError("there is no parameter that requires a gradient")
    meshes = {each.device_mesh for each in held.values()}
    if len(meshes) > 1:
        raise ConfigError(_TWO_MESHES)
    return meshes.pop()


def _checked(name: str, held: Tensor) -> DTensor:
    if not isinstance(held, DTensor):
        raise ConfigError(
            f"parameter {name!r} is not sharded (ignored_params), so that its gradient is not averaged: "
            "freeze it or shard it"
        )
    if any(isinstance(each, Replicate) for each in held.placements):
        raise ConfigError(
            f"parameter {name!r} is on a mesh of {held.device_mesh.ndim} dimensions, over which FSDP would "
            "average all gradients by itself: give fully_shard() the shard axis alone, "
            "fully_shard(module, mesh=mesh['shard'])"
        )
    if len(held.placements) != 1 or type(held.placements[0]) is not Shard:
        raise ConfigError(
            f"parameter {name!r} is placed as {held.placements}: no way of sharding besides fully_shard() is "
            "supported"
        )
    return held


def _mapped(states: Mapping[int, Any], change: Callable[[int, Any], Any]) -> dict[int, Any]:
    return {
        index: {key: change(index, value) for key, value in state.items()} for index, state in states.items()
    }


def _sharded_like(held: Any, value: Any) -> Any:
    """Return a tensor as large as this rank's shard of `held` as a shard of the same kind."""
    if isinstance(value, Tensor) and isinstance(held, DTensor) and value.shape == plain_part_of(held).shape:
        return DTensor.from_local(
            value, held.device_mesh, held.placements, shape=held.shape, stride=held.stride()
        )
    return value
