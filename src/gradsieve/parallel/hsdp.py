"""`attach(model, optimizer, replicate=mesh["replicate"])`: FSDP2 inside a host, sparse between hosts.

    mesh = init_device_mesh("cuda", (hosts, ranks_a_host), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])

FSDP averages gradients among the shards of one host, and the optimizer steps this rank's shards. What they
moved is exchanged with the ranks that hold the same shards on other hosts, the replicate group: to the
engine they are a model, and that group is the world. Ranks of one host exchange nothing here, and need not
agree on how much is sent. A "rank" in messages of a sync is the number of the host, its place in `replicate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import Unpack

from gradsieve import torch_names
from gradsieve.checkpoint import directory, reshard, sharded_directory, state
from gradsieve.comm.c10d import Engine
from gradsieve.errors import ConfigError, Malformed
from gradsieve.parallel.fit import model_in
from gradsieve.parallel.model_sync import ModelSync, Settings
from gradsieve.pipeline import StepPipeline
from gradsieve.pipeline.budget import Fixed
from gradsieve.pipeline.exchange_settings import Steps, choose_exchange, choose_scheme
from gradsieve.pipeline.optimizer_adapter import OptimizerAdapter, StepAdapter
from gradsieve.replica.shards import ShardedReplica, ShardedViews, Shards


class HsdpSync(ModelSync):
    """A GradientSync of this rank's shards, between the hosts."""

    replica: ShardedReplica
    hears_first: ClassVar[bool] = True  # FSDP's own hook gathers the parameters
    may_choose_period: ClassVar[bool] = False  # shards of a host would choose different ones
    _host_has_notice = False

    def __init__(
        self, model: nn.Module, optimizer: Any, replicate: DeviceMesh, **settings: Unpack[Settings]
    ) -> None:
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
        self, engine: Engine, held: Mapping[str, Tensor], adapter: OptimizerAdapter, fixed: Fixed | None
    ) -> ShardedReplica:
        assert isinstance(adapter, StepAdapter)
        views, part = ShardedViews(self.shards, adapter.pipeline), f".shard{self.shards.rank}"
        return ShardedReplica(engine, held, adapter, views, fixed, part, shards=self.shards)

    def enter(self) -> None:
        """Also to FSDP."""
        super().enter()
        self._averaged = False
        self.shards.listen(self._after_averaging)

    def leave(self) -> None:
        self.shards.listen(None)
        super().leave()

    # -- a step -----------------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module) -> None:
        # In backward it is computed once more, for a checkpoint.
        if torch.is_grad_enabled() and not torch_names.is_in_backward():
            self._averaged = False
        super().before_forward(module)
        if isinstance(self.replica.views, ShardedViews):
            self.replica.views.before_gathering()

    def _after_averaging(self) -> None:
        """FSDP says so of each of its groups of parameters; the exchange belongs to all of them."""
        if not self._averaged:
            self._averaged = True
            self.belongs_to_a_backward()

    def after_update(self, names: Set[str]) -> None:
        self._averaged = False
        super().after_update(names)

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
        """On all shards of this host, or it would take a part of a step. A notice to one of them is one to
        the host: each shard sends it to its own likes on other hosts, all in the same exchange."""
        odd = torch.tensor(
            [not super().are_finite(gradients), super()._has_notice],
            dtype=torch.int32,
            device=self.replica.device,
        )
        dist.all_reduce(odd, dist.ReduceOp.MAX, group=self.shards.group)
        some_are_not, noticed = odd.tolist()
        self._host_has_notice |= bool(noticed)
        return not some_are_not

    @property
    def _has_notice(self) -> bool:
        return self._host_has_notice

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_` would clip the mean of all hosts' gradients, over all shards:
        call it on all of them, before the optimizer's step. Returns the norm of that mean."""
        assert isinstance(self.pipeline, StepPipeline)
        rho = torch.tensor([self.pipeline.rho], dtype=torch.float64, device=self.replica.device)
        dist.all_reduce(rho, group=self.shards.group)
        shorter = float(rho / self.shards.count) ** 0.5  # each shard has measured its own
        norm = torch.nn.utils.clip_grad_norm_(self.held.values(), max_norm / shorter)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return torch.mul(whole, shorter)

    # -- state ------------------------------------------------------------------------------------------

    @property
    def _prefix(self) -> str:
        return f"shard{self.shards.rank}-of-{self.shards.count}/"

    def state_dict(self) -> dict[str, Tensor]:
        """As ever, with keys unique to the shard, too: distributed checkpointing keeps one of equal keys."""
        return {self._prefix + key: each for key, each in super().state_dict().items()}

    def load_state_dict(self, stored: Mapping[str, Tensor]) -> None:
        """Of as many shards as now; of another number, `save` and `load`."""
        ours = {key.removeprefix(self._prefix): each for key, each in stored.items()}
        self.quiesce("load_state_dict()")
        state.load(self.replica, lambda: self._on_all_shards(lambda: state.offer_of(self.replica, ours)))

    def save_pair(self, folder: str | PathLike[str], optimizers: bool, pair: str) -> None:
        """Write a checkpoint of all shards of all hosts, with the optimizers' states, to a folder that all
        ranks see. Call it on all ranks. Until it is whole the one before is. No framework pairs a file with
        it."""
        self.quiesce("save()")
        sharded_directory.save(self.replica, Path(folder), self._writer.next, optimizers)

    def load(self, folder: str | PathLike[str], optimizers: bool = True) -> None:
        """Load what `save` wrote, also with other numbers of hosts and shards; on all ranks or on none. Call
        it on all of them."""
        self.quiesce("load()")
        state.load(self.replica, lambda: self._on_all_shards(lambda: self._read(Path(folder), optimizers)))

    def _read(self, folder: Path, optimizers: bool) -> state.Offer:
        whole = sharded_directory.read_whole(folder, self.shards)
        if whole.shards != self.shards.count:
            return reshard.offer_of(self.replica, folder, whole, optimizers)
        manifest = whole.manifest_of(folder, self.shards.rank)
        inner = whole.inner(folder, self.shards.rank)
        return directory.offer_of(self.replica, inner, manifest, optimizers)

    def _on_all_shards(self, read: Callable[[], state.Offer]) -> state.Offer:
        """Or on none of them: these pass it on to the hosts that hold the others' shards."""
        offer, problem = None, None
        try:
            offer = read()
        except Exception as error:  # whatever it is, the other shards wait for the outcome
            problem = error
        steps = sharded_directory.agreed(
            self.replica, "nothing was loaded", problem, f"{offer.part.step} " if offer else ""
        )
        assert offer is not None
        if len(set(steps.split())) > 1:
            raise Malformed(f"shards of this host are of different steps: {steps}")
        return offer


def add_residual(model: nn.Module, folder: str | PathLike[str]) -> None:
    """Make the model of a checkpoint that `HsdpSync.save` wrote, of any numbers of hosts and shards, complete
    in a model that is sharded over one host, or over all, and goes on without a sync. Call it on all ranks;
    nobody is asked. Optimizers are not touched."""
    shards = Shards(model_in(model))
    with torch.no_grad():
        for name, complete in reshard.waiting_in(Path(folder), shards).items():
            torch_names.local_of(shards.parts[name].held).copy_(complete)


def _local(gradient: Tensor) -> Tensor:
    return torch_names.local_of(gradient) if isinstance(gradient, DTensor) else gradient


def _fit(wrapped: Any, replicate: DeviceMesh) -> tuple[nn.Module, dist.ProcessGroup]:
    """The sharded model, and the group that it is exchanged over."""
    model: Any = model_in(wrapped)
    if not isinstance(model, nn.Module) or not isinstance(model, FSDPModule):
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
            "the replicate axis has one rank, so that there is nothing to exchange: leave out attach(). The "
            "residual in a checkpoint of more hosts goes into the model by add_residual(): docs/hsdp.md"
        )
    return model, replicate.get_group()


def _refuse_gradients(settings: Settings) -> None:
    exchange = settings.get("exchange")
    scheme = choose_scheme(settings.get("scheme"), settings.get("density"), settings.get("bits"), exchange)
    chosen = choose_exchange(exchange, scheme)
    if not isinstance(chosen, Steps) or (scheme.lossless and chosen.every == 1):
        raise ConfigError(
            "with replicate= steps are exchanged, not gradients (gradsieve.Gradients, published schemes, "
            "dense ones): for dense averaging give fully_shard() the whole mesh, and leave out attach()"
        )
