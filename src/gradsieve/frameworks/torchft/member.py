"""A sync whose group changes while it trains: replicas die, are late, come back, join; the others go on.

    exchange   exchange all units, apply nothing, and gather the norm of each residual that will be left
    commit     apply it. torchft decides on each replica whether to (`adapter.py`)
               or keep it: the next rendezvous shows whether the other replicas committed it
    join       meet in another group: partitions and states are initialised again for its size

A replica commits after all members have said that they are prepared. What one replica has prepared may
therefore have been committed by others in its absence, and it can still commit it, because it has the result.
What one replica has not prepared was committed by no other. So every step is counted exactly once.

A replica that is gone takes along its residual. The others know its norm, as of the last exchange, and count
it as missing until the replica is back. A replica that was away keeps its residual and takes the others'
shared model. A new replica takes the mean of the others' residuals:

    e' = mean of e over those who have trained         so that w - mean e stays where it was

Replicas that all start again together may load a checkpoint that an earlier group saved, of any size. A
replica that is started again while others train takes their state instead, which is newer.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradsieve.checkpoint.fields import fields_from_tensors
from gradsieve.checkpoint.rank_state import (
    Merger,
    RankState,
    capture,
    for_world,
    residual_in,
    restore,
    with_residuals,
)
from gradsieve.comm.ops import AllGather
from gradsieve.errors import ConfigError, DivergenceError, MismatchError
from gradsieve.frameworks.torchft.membership import Membership, ReplicaRecord
from gradsieve.optimizers import as_list
from gradsieve.pipeline import Pending, Pipeline
from gradsieve.ranks_alike import as_bytes, as_text
from gradsieve.runner import Runner
from gradsieve.sync import GradientSync
from gradsieve.types import Program, fields_to_tensors
from gradsieve.units import flat_view


class PreparedRunner(Runner):
    """Prepare exchanges, and apply them when told to."""

    def exchange(self, call: str) -> tuple[Pending, list[float]]:
        """Exchange, and return what `apply` takes and the residual's norm on each rank once it is applied."""
        super().compare_if_due()
        self.begin(call)
        prepared, self.pending = self.pending, None  # an optimizer's step would apply it
        assert prepared is not None
        wait(prepared.futures)
        for future in prepared.futures:
            future.result()
        what = f"the word that exchange {self.pipeline.step} is prepared"
        return prepared, self.norms_of_all(self.pipeline.remaining_norm(prepared), what)

    def norms_of_all(self, norm: float, what: str) -> list[float]:
        def gathered() -> Program[Tensor]:
            return (yield AllGather(torch.tensor([norm], dtype=torch.float64, device=self.device)))

        rows: Tensor = self.engine.run(gathered(), what, self.device)
        return [float(row) for row in rows.flatten()]

    def apply(self, prepared: Pending) -> None:
        self.pending = prepared
        self.complete()
        self.refresh()
        self.replica.models.raise_versions()

    def compare_if_due(self) -> None:
        """Do nothing: the exchange is committed, and a peer that dies now must not make it look failed."""


class PreparedSync(GradientSync):
    runner_type: ClassVar[type[Runner]] = PreparedRunner
    is_elastic: ClassVar[bool] = True
    runner: PreparedRunner


class Member:
    """Hold a replica's model, optimizers and sync, from group to group."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        optimizer: Any,
        name: str,
        settings: Mapping[str, Any],
    ) -> None:
        self._given = dict(parameters)
        self.parameters = {name: p for name, p in self._given.items() if p.requires_grad}
        self.optimizers = as_list(optimizer)
        self.name, self._settings = name, dict(settings)
        self.identity = secrets.randbits(62)  # of this process: a restarted one is another replica
        self.membership = Membership()
        self.failed = 0  # exchanges that were not committed here at once
        self.sync: PreparedSync | None = None
        self.checkpoint: Path | None = None  # to load, if all replicas are to
        self._members: list[tuple[int, str]] = []
        self._group = -1
        self._last: tuple[int, int] | None = None  # group and number of the last exchange committed here
        # Step, world, figures and fields of the scheme's states: replicated, besides the model.
        self._agreed: dict[str, Any] | None = None
        self._kept: dict[str, Tensor] | None = None  # the pipeline's memories, between two groups
        self._prepared: dict[int, ReplicaRecord] = {}
        self._held: Pending | None = None
        self._all_begin = False  # whether no member had trained before this group met

    @property
    def pipeline(self) -> Pipeline:
        assert self.sync is not None
        return self.sync.pipeline

    # -- an exchange ------------------------------------------------------------------------------------

    def exchange(self, call: str = "training") -> None:
        assert self.sync is not None
        self._held, self._prepared = None, {}
        step = self.pipeline.step
        self._held, norms = self.sync.runner.exchange(call)
        self._prepared = self._seen(step, norms)

    def _seen(self, step: int, norms: list[float]) -> dict[int, ReplicaRecord]:
        return {
            identity: ReplicaRecord(name, self._group, step, norm)
            for (identity, name), norm in zip(self._members, norms, strict=True)
        }

    def commit(self) -> None:
        assert self.sync is not None
        assert self._held is not None
        self.sync.runner.apply(self._held)
        self.membership.commit(self._prepared)
        self._held, self._prepared = None, {}
        self._last = self.membership.last_of(self.identity)
        self._agree()

    def _agree(self) -> None:
        pipeline = self.pipeline
        self._agreed = {
            "step": pipeline.step,
            "world": pipeline.world,
            "figures": dict(pipeline.figures()),
            "states": [fields_to_tensors(state) for state in pipeline.states],
        }

    # -- from replica to replica ------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a replica needs that joins or was away."""
        kept = self._kept if self.sync is None else self.pipeline.kept()
        if kept is None:
            kept = {f"shared/{name}": flat_view(p.detach()) for name, p in self.parameters.items()}
        return {
            "shared": {key.partition("/")[2]: v for key, v in kept.items() if key.startswith("shared/")},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "agreed": self._agreed,
            "accounts": self.membership,
        }

    def take(self, state: Mapping[str, Any]) -> bool:
        """Take a peer's state, of a later exchange, and return whether this replica's model has changed. It
        has not if all that was missing here had been prepared here."""
        shared: dict[str, Tensor] = state["shared"]
        differing = [
            n for n, p in self.parameters.items() if n not in shared or shared[n].numel() != p.numel()
        ]
        if differing or len(shared) != len(self.parameters):
            raise MismatchError(
                f"replica {self.name}: the others train another model; this one's {', '.join(differing[:4])} "
                "is not in it. Start all replicas with the same program"
            )
        membership, agreed = state["accounts"], state["agreed"]
        if self._last is None:
            for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(stored)
            self.leave_group()
            self._kept = {f"{kind}/{n}": v for n, v in shared.items() for kind in ("shared", "own", "mark")}
            self.membership, self._agreed = membership, agreed
            return True
        self._resolve_held(membership)
        self.leave_group()
        before, self.membership, self._agreed = self._agreed, membership, agreed
        assert before is not None
        assert self._kept is not None
        if before["step"] == agreed["step"]:
            return False
        # The residual stays, with another shared model.
        residuals = {name: residual_in(self._kept, name) for name in shared}
        memories = self._kept | {f"shared/{name}": model for name, model in shared.items()}
        self._kept = with_residuals(memories, residuals, agreed["figures"]["preview"])
        return True

    def _resolve_held(self, membership: Membership) -> None:
        """Commit what was prepared here if the others did."""
        last, mine = membership.last_of(self.identity), self._prepared.get(self.identity)
        if mine is not None and last == (mine.group, mine.exchange):
            self.commit()
        elif last != self._last:
            raise DivergenceError(
                f"replica {self.name}: its last exchange {self._last} is not the last that the others made "
                f"with it, {last}: it went on by itself while they did without it. Restart it: it joins "
                "again, and its residual is lost, as the others have counted"
            )

    # -- checkpoints ------------------------------------------------------------------------------------

    def load_if_all_begin(self) -> bool:
        """Load in the first group that this replica joins, and return whether it did. If other members have
        trained, they bring this one up instead."""
        folder, sync = self.checkpoint, self.sync
        assert sync is not None
        if folder is None or self._last is not None:
            return False
        if self._all_begin:
            sync.load(folder)
        self.checkpoint = None
        if not self._all_begin:
            return False
        kept, step = self.pipeline.kept(), self.pipeline.step
        residuals = [residual_in(kept, name).double().norm() for name in self.parameters]
        norms = sync.runner.norms_of_all(
            float(torch.stack(residuals).norm()), f"each residual after exchange {step}"
        )
        # As if these replicas had made the last exchange of the checkpoint.
        self.membership = Membership(self._seen(step - 1, norms))
        self._last = self.membership.last_of(self.identity)
        self._agree()
        return True

    # -- groups -----------------------------------------------------------------------------------------

    def leave_group(self) -> None:
        """Keep this replica's memories. What was prepared and not committed stays in the residual."""
        self._held, self._prepared = None, {}
        if self.sync is not None:
            self._kept = {key: part.clone() for key, part in self.pipeline.kept().items()}
            self.sync.abandon()
            self.sync = None

    def join(self, group: int) -> None:
        """Go on in torch.distributed's default group, which is the members' `group`. If this fails, the
        memories stay for the next one."""
        self.leave_group()
        if self._kept is not None:
            for name, parameter in self.parameters.items():  # ranks compare them
                flat_view(parameter.data).copy_(self._kept[f"shared/{name}"])
        sync = PreparedSync(self._given.items(), self.optimizers, **self._settings)
        try:
            if not sync.pipeline.exchanges_steps:
                raise ConfigError(
                    f"replica {self.name}: only what exchanges steps can change its group; leave out "
                    "gradsieve.Gradients, published schemes and lossless ones"
                )
            meeting = self._meeting(sync, sync.pipeline)
            members = sync.engine.run(meeting, f"the rendezvous of group {group}", sync.replica.device)
        except BaseException:
            sync.abandon()
            raise
        self.sync, self._group, self._members, self._kept = sync, group, members, None

    def _meeting(self, sync: PreparedSync, pipeline: Pipeline) -> Program[list[tuple[int, str]]]:
        mine = [self.identity, int(self._last is not None), int(self.checkpoint is not None)]
        rows = (yield AllGather(torch.tensor(mine, dtype=torch.int64, device=sync.replica.device))).tolist()
        names = [as_text(text) for text in (yield AllGather(as_bytes(self.name, sync.replica.device)))]
        trained = sum(row[1] for row in rows)
        self._all_begin = trained == 0
        if self._all_begin and len({row[2] for row in rows}) > 1:
            without = [name for row, name in zip(rows, names, strict=True) if not row[2]]
            raise MismatchError(
                f"replica {self.name}: some replicas are to go on from a checkpoint, and {without[0]} is to "
                "begin again. Call load(folder) on all of them, or on none"
            )
        part = self._part_for(pipeline)
        if 0 < trained < len(rows):
            merger = Merger(pipeline, trained)
            if self._last is not None:
                merger.add_residuals(part.memories)
            means = yield from merger.means()
            if self._last is None:
                memories = with_residuals(part.memories, means, part.figures["preview"])
                part = replace(part, memories=memories)
        restore(pipeline, part)
        sync.replica.compared = part.step
        sync.replica.models.point_again()
        return [(row[0], name) for row, name in zip(rows, names, strict=True)]

    def _part_for(self, pipeline: Pipeline) -> RankState:
        """Return what this replica goes on with among the members of the new group."""
        part, agreed = capture(pipeline), self._agreed
        memories = part.memories
        if self._kept is not None:  # those of a peer are all in the shared model's type
            memories = {key: self._kept[key].to(view.dtype) for key, view in memories.items()}
        if agreed is None:
            return RankState(part.step, part.figures, memories, part.states)
        world = agreed["world"]
        states = [
            fields_from_tensors(state, fields, "")
            for state, fields in zip(pipeline.init_states(world), agreed["states"], strict=True)
        ]
        part = RankState(agreed["step"], agreed["figures"], memories, states)
        return for_world(pipeline, part, world, residuals_differ=True)
