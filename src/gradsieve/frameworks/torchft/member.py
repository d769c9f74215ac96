"""A sync whose group changes while it trains: replicas die, are late, come back, join; the others go on.

    exchange   all units, of which nothing is applied yet; then each sends the norm of its residual after that
    commit     apply it. Somebody outside decides, each replica for itself: torchft (`adapter.py`)
    hold       not committed here; whether it was elsewhere shows at the replicas' next rendezvous
    join       another group: partitions and states are initialised again for its number

Who commits has heard of all members that they are prepared. So what one of them has prepared may have been
committed by another although it was not here, and can then still be: the result is there. And what is not
prepared on one of them was committed by nobody. That is why no step is ever counted twice, or not at all.

A member that is gone takes along its residual. The others know its norm, as of the last exchange, and count
it as missing until the member is back. A member that was away keeps its residual and takes the others' shared
model. One that is new takes the mean of the others' residuals:

    e' = mean of e over those who have trained         so that w - mean e stays where it was

Replicas that all start again together may go on from a checkpoint that a group of theirs saved, of as many as
there were then. One that is started again while others train takes their state instead, which is newer.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsieve.checkpoint.fields import fields_from_tensors
from gradsieve.checkpoint.rank_state import (
    RankState,
    capture,
    figures_among,
    models_with,
    residual_in,
    restore,
    states_among,
)
from gradsieve.comm.engine import Engine
from gradsieve.comm.ops import AllGather, AllReduce
from gradsieve.errors import ConfigError, DivergenceError, MismatchError
from gradsieve.feedback.units import flat_view
from gradsieve.frameworks.torchft.accounts import Accounts, LastSeen
from gradsieve.optimizers import as_list
from gradsieve.pipeline import StepPipeline
from gradsieve.pipeline.budget import Budget
from gradsieve.pipeline.optimizer_adapter import OptimizerAdapter
from gradsieve.ranks_alike import as_bytes, as_text
from gradsieve.replica.replica import Replica
from gradsieve.sync.gradient_sync import GradientSync
from gradsieve.sync.pending import Pending
from gradsieve.types import Program, fields_to_tensors


class PreparedSync(GradientSync):
    """One whose exchanges wait for a word from outside before they are applied."""

    def make_replica(
        self, engine: Engine, held: Mapping[str, Tensor], adapter: OptimizerAdapter, fixed: Budget | None
    ) -> Replica:
        """Who joins later does not know the others' learning rate yet; and a group may have one member."""
        replica = super().make_replica(engine, held, adapter, fixed)
        replica.is_elastic = True
        return replica

    def prepare(self, call: str) -> list[float]:
        """Exchange; the norm of each rank's residual, once this is applied."""
        pipeline = self.pipeline
        assert isinstance(pipeline, StepPipeline)
        super()._compare()
        self.begin_step()
        self.start_exchange(call)
        assert self._pending is not None
        try:
            wait(self._pending.futures)
            for future in self._pending.futures:
                future.result()
            return self.norms_of_all(
                pipeline.remaining_norm(), f"the word that exchange {pipeline.step} is prepared"
            )
        except BaseException:
            self.set_aside()
            raise

    def norms_of_all(self, norm: float, what: str) -> list[float]:
        def gathered() -> Program[Tensor]:
            return (yield AllGather(torch.tensor([norm], dtype=torch.float64, device=self.replica.device)))

        rows: Tensor = self.engine.run(gathered(), what, self.replica.device)
        return [float(row) for row in rows.flatten()]

    def set_aside(self) -> Pending | None:
        """So that no optimizer's step applies it."""
        aside, self._pending = self._pending, None
        return aside

    def apply(self, aside: Pending | None = None) -> None:
        if aside is not None:
            self._pending = aside
        self.complete()
        self.refresh()
        self.replica.views.raise_versions()

    def _compare(self) -> None:
        """Not after an exchange: that is committed, and a peer that dies now must not make it look failed."""


class Member:
    """One replica's model, optimizer and sync, from group to group."""

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
        self.identity = secrets.randbits(62)  # of this process: one that was restarted is another replica
        self.accounts = Accounts()
        self.failed = 0  # exchanges that were not committed here at once
        self.sync: PreparedSync | None = None
        self.checkpoint: Path | None = None  # from which it is to go on, if the others are to as well
        self._members: list[tuple[int, str]] = []
        self._group = -1
        self._last: tuple[int, int] | None = None  # group and number of the last exchange committed here
        # Step, world, figures and fields of the scheme's states: what replicas agreed on besides the model.
        self._agreed: dict[str, Any] | None = None
        self._kept: dict[str, Tensor] | None = None  # what the pipeline kept, while there is none
        self._prepared: dict[int, LastSeen] = {}
        self._held: Pending | None = None
        self._all_begin = False  # whether nobody in this group had trained at its rendezvous

    @property
    def pipeline(self) -> StepPipeline:
        assert self.sync is not None
        assert isinstance(self.sync.pipeline, StepPipeline)
        return self.sync.pipeline

    # -- an exchange ------------------------------------------------------------------------------------

    def exchange(self, call: str = "training") -> None:
        assert self.sync is not None
        self._prepared = {}
        step = self.pipeline.step
        self._prepared = self._seen(step, self.sync.prepare(call))

    def _seen(self, step: int, norms: list[float]) -> dict[int, LastSeen]:
        """All members of this group in an exchange of it."""
        return {
            identity: LastSeen(name, self._group, step, norm)
            for (identity, name), norm in zip(self._members, norms, strict=True)
        }

    def commit(self) -> None:
        """Apply what was exchanged."""
        assert self.sync is not None
        self.sync.apply(self._held)
        mine = self._prepared[self.identity]
        self._held, self._last = None, (mine.group, mine.exchange)
        self.accounts.commit(self._prepared)
        self._prepared = {}
        self._agree()

    def _agree(self) -> None:
        pipeline = self.pipeline
        self._agreed = {
            "step": pipeline.step,
            "world": pipeline.world,
            "figures": dict(pipeline.figures()),
            "states": [fields_to_tensors(state) for state in pipeline.states],
        }

    def hold(self) -> None:
        """It is not committed here; if it was prepared, it is kept until the others say what they did."""
        self.failed += 1
        if self.sync is not None and self._prepared:
            self._held = self.sync.set_aside()

    # -- from replica to replica ------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What others need who join, or were away."""
        kept = self._kept if self.sync is None else self.pipeline.kept()
        if kept is None:
            kept = {f"shared/{name}": flat_view(p.detach()) for name, p in self.parameters.items()}
        return {
            "shared": {key.partition("/")[2]: v for key, v in kept.items() if key.startswith("shared/")},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "agreed": self._agreed,
            "accounts": self.accounts.state(),
        }

    def take(self, state: Mapping[str, Any]) -> bool:
        """A peer's state, of an exchange that is ahead of this replica's. Whether the model is another now:
        it is not where all that was missing here had been prepared here."""
        shared: dict[str, Tensor] = state["shared"]
        differing = [
            n for n, p in self.parameters.items() if n not in shared or shared[n].numel() != p.numel()
        ]
        if differing or len(shared) != len(self.parameters):
            raise MismatchError(
                f"replica {self.name}: the others train another model; this one's {', '.join(differing[:4])} "
                "is not in it. Start all replicas with the same program"
            )
        accounts = Accounts.of(state["accounts"])
        if self._last is None:
            for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(stored)
            self.leave_group()
            self._kept = {f"{kind}/{n}": v for n, v in shared.items() for kind in ("shared", "own", "mark")}
            self._agreed = None
        else:
            self._resolve_held(accounts)
            self.leave_group()
        before, self.accounts, self._agreed = self._agreed, accounts, state["agreed"]
        if before is not None and self._agreed is not None and before["step"] == self._agreed["step"]:
            return False
        if self._last is not None:  # its residual stays, with another shared model
            assert self._kept is not None
            preview = 1.0 if self._agreed is None else self._agreed["figures"]["preview"]
            for name, model in shared.items():
                residual, own = residual_in(self._kept, name).to(model.device), self._kept[f"own/{name}"]
                self._kept |= models_with(name, model, residual, preview, own.dtype)
        return True

    def _resolve_held(self, accounts: Accounts) -> None:
        """What was prepared here was committed with this replica's part, or it was not."""
        last, mine = accounts.last_of(self.identity), self._prepared.get(self.identity)
        if self._held is not None and mine is not None and last == (mine.group, mine.exchange):
            self.commit()
        elif last != self._last:
            raise DivergenceError(
                f"replica {self.name}: its last exchange {self._last} is not the last that the others made "
                f"with it, {last}: it went on by itself while they did without it. Restart it: it joins "
                "again, and its residual is lost, as the others have counted"
            )

    # -- checkpoints ------------------------------------------------------------------------------------

    def load_if_all_begin(self) -> bool:
        """Once in the life of a replica, with the first group it has joined. Whether its state is now that of
        the checkpoint; it is not where others have trained and this one was brought up by them."""
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
        residuals = [residual_in(kept, name).double().norm() for name in self.pipeline.own]
        norms = sync.norms_of_all(
            float(torch.stack(residuals).norm()), f"each residual after exchange {step}"
        )
        # As if the last exchange of the checkpoint had been made by these.
        self.accounts = Accounts(self._seen(step - 1, norms))
        self._last = (self._group, step - 1)
        self._agree()
        return True

    # -- groups -----------------------------------------------------------------------------------------

    def leave_group(self) -> None:
        """With all that is this replica's own. What was prepared and not committed stays in the residual."""
        self._held, self._prepared = None, {}
        if self.sync is not None:
            self._kept = {key: part.clone() for key, part in self.pipeline.kept().items()}
            self.sync.abandon()
            self.sync = None

    def join(self, group: int) -> None:
        """Go on in torch.distributed's default group, whose number all its members call it by. One that fails
        leaves all that this replica has, for the next."""
        self.leave_group()
        if self._kept is not None:
            for name, parameter in self.parameters.items():  # all alike: it is compared
                flat_view(parameter.data).copy_(self._kept[f"shared/{name}"])
        sync = PreparedSync(self._given.items(), self.optimizers, **self._settings)
        try:
            if not isinstance(sync.pipeline, StepPipeline):
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

    def _meeting(self, sync: PreparedSync, pipeline: StepPipeline) -> Program[list[tuple[int, str]]]:
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
        step, figures, memories, states = self._part_for(pipeline)
        for name, own in pipeline.own.items() if 0 < trained < len(rows) else ():
            model, residual = memories[f"shared/{name}"], residual_in(memories, name)
            total = yield AllReduce(torch.zeros_like(residual) if self._last is None else residual)
            if self._last is None:  # one that is new takes the mean
                memories |= models_with(name, model, total / trained, figures["preview"], own.dtype)
        restore(pipeline, RankState(step, figures, memories, states))
        sync.replica.compared = step
        sync.replica.views.renew()
        return [(row[0], name) for row, name in zip(rows, names, strict=True)]

    def _part_for(
        self, pipeline: StepPipeline
    ) -> tuple[int, Mapping[str, float], dict[str, Tensor], list[Any]]:
        """What this replica goes on with, for as many as there are now."""
        part, agreed = capture(pipeline), self._agreed
        memories = dict(part.memories if self._kept is None else self._kept)
        if agreed is None:
            return part.step, part.figures, memories, part.states
        world, scheme = agreed["world"], pipeline.scheme
        figures = figures_among(pipeline, agreed["figures"], world, residuals_differ=True)
        states = [
            fields_from_tensors(scheme.init_state(unit.sizes, world), fields, "")
            for unit, fields in zip(pipeline.units, agreed["states"], strict=True)
        ]
        return agreed["step"], figures, memories, states_among(pipeline, states)
