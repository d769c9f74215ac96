"""A sync whose group changes while it trains: replicas die, are late, come back, join; the others go on.

    exchange   all units, of which nothing is applied yet; then each sends the norm of its residual after that
    commit     apply it. Somebody outside decides, each replica for itself: torchft (`frameworks/torchft.py`)
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

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm.c10d import Engine
from gradsieve.comm.ops import AllGather, AllReduce
from gradsieve.consensus.handshake import as_bytes, as_text
from gradsieve.errors import ConfigError, DivergenceError, MismatchError
from gradsieve.feedback import checkpoint
from gradsieve.feedback.coherence import Coherence
from gradsieve.feedback.units import flat_view
from gradsieve.pipeline import StepPipeline
from gradsieve.pipeline.budget import Fixed
from gradsieve.pipeline.optimizer_adapter import OptimizerAdapter
from gradsieve.pipeline.parts import RankState, capture, restore
from gradsieve.replica.replica import Replica
from gradsieve.sync.gradient_sync import GradientSync
from gradsieve.sync.optimizer_hooks import as_list
from gradsieve.sync.pending import Pending
from gradsieve.types import Program

_log = logging.getLogger("gradsieve")


@dataclass(frozen=True, slots=True)
class LastSeen:
    """A replica, after the last exchange that was committed with it."""

    name: str
    group: int
    exchange: int
    waiting: float
    """Norm of its residual then, which is in no model but its own."""


@dataclass(slots=True)
class Accounts:
    """Who is there and who is missing, the same on all replicas that share a model."""

    present: dict[int, LastSeen] = field(default_factory=dict)
    missing: dict[int, LastSeen] = field(default_factory=dict)
    returned: int = 0

    def commit(self, members: Mapping[int, LastSeen]) -> None:
        """An exchange of these was committed."""
        for identity in self.present.keys() - members.keys():
            gone = self.missing[identity] = self.present[identity]
            _log.warning(
                "exchange %d: replica %s is gone. Its residual, of norm %.4g after its last exchange "
                "(%d), is lost unless it returns; so are its steps since then",
                max(each.exchange for each in members.values()),
                gone.name,
                gone.waiting,
                gone.exchange,
            )
        for identity in self.missing.keys() & members.keys():
            back = self.missing.pop(identity)
            self.returned += 1
            _log.info("replica %s is back, with its residual", back.name)
        self.present = dict(members)

    def figures(self) -> dict[str, float]:
        return {
            "replicas": len(self.present),
            "replicas_missing": len(self.missing),
            "replicas_returned": self.returned,
            "lost_mass": sum(each.waiting for each in self.missing.values()),
        }


@dataclass(frozen=True, slots=True)
class Agreed:
    """What replicas agreed on with their last exchange, besides the model."""

    step: int
    world: int
    figures: Mapping[str, float]
    states: Sequence[Any]
    """Of the scheme, by unit; or their fields, from a peer."""


class PreparedSync(GradientSync):
    """One whose exchanges wait for a word from outside before they are applied."""

    def make_replica(
        self, engine: Engine, held: Mapping[str, Tensor], adapter: OptimizerAdapter, fixed: Fixed | None
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
            norm = torch.tensor([pipeline.remaining_norm()], dtype=torch.float64, device="cpu")
            what = f"the word that exchange {pipeline.step} is prepared"
            rows: Tensor = self.engine.run(_gathered(norm.to(self.replica.device)), what, self.replica.device)
        except BaseException:
            self.set_aside()
            raise
        return [float(row) for row in rows.flatten()]

    def set_aside(self) -> Pending | None:
        """So that no optimizer's step applies it."""
        aside, self._pending = self._pending, None
        return aside

    def apply(self, aside: Pending | None = None) -> None:
        if aside is not None:
            self._pending = aside
        self.complete(self.parameters.keys())
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
        self.identity = secrets.randbits(62)
        """Of this process: one that was restarted is another replica."""
        self.accounts = Accounts()
        self.failed = 0
        """Exchanges that were not committed here at once."""
        self.sync: PreparedSync | None = None
        self.checkpoint: Path | None = None
        """From which this replica is to go on, if the others are to as well."""
        self._members: list[tuple[int, str]] = []
        self._group = -1
        self._last: tuple[int, int] | None = None
        """Group and number of the last exchange that was committed here."""
        self._agreed: Agreed | None = None
        self._kept: dict[str, Tensor] | None = None
        """What the pipeline kept, while there is none."""
        self._prepared: dict[int, LastSeen] = {}
        self._held: Pending | None = None
        self._all_begin = False
        """Whether nobody in this group had trained at its rendezvous."""

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
        norms = self.sync.prepare(call)
        self._prepared = {
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
        pipeline = self.pipeline
        self._agreed = Agreed(pipeline.step, pipeline.world, pipeline.figures(), list(pipeline.states))

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
        agreed = self._agreed
        return {
            "shared": {key.partition("/")[2]: v for key, v in kept.items() if key.startswith("shared/")},
            "optimizers": [one.state_dict() for one in self.optimizers],
            "agreed": None
            if agreed is None
            else {
                "step": agreed.step,
                "world": agreed.world,
                "figures": dict(agreed.figures),
                "states": [
                    dict(each) if isinstance(each, Mapping) else checkpoint.fields_to_tensors(each, "")
                    for each in agreed.states
                ],
            },
            "present": {identity: asdict(seen) for identity, seen in self.accounts.present.items()},
            "missing": {identity: asdict(seen) for identity, seen in self.accounts.missing.items()},
            "returned": self.accounts.returned,
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
        accounts = Accounts(
            {identity: LastSeen(**each) for identity, each in state["present"].items()},
            {identity: LastSeen(**each) for identity, each in state["missing"].items()},
            state["returned"],
        )
        if self._last is None:
            for one, stored in zip(self.optimizers, state["optimizers"], strict=True):
                one.load_state_dict(stored)
            self.leave_group()
            self._kept = {f"{kind}/{n}": v for n, v in shared.items() for kind in ("shared", "own", "mark")}
            self._agreed = None
        else:
            self._resolve_held(accounts)
            self.leave_group()
        before, self.accounts = self._agreed, accounts
        self._agreed = None if state["agreed"] is None else Agreed(**state["agreed"])
        if before is not None and self._agreed is not None and before.step == self._agreed.step:
            return False
        if self._last is not None:
            self._keep_residual(shared)
        return True

    def _resolve_held(self, accounts: Accounts) -> None:
        """What was prepared here was committed with this replica's part, or it was not."""
        others = accounts.present.get(self.identity) or accounts.missing.get(self.identity)
        last = None if others is None else (others.group, others.exchange)
        mine = self._prepared.get(self.identity)
        if self._held is not None and mine is not None and last == (mine.group, mine.exchange):
            self.commit()
        elif last != self._last:
            raise DivergenceError(
                f"replica {self.name}: its last exchange {self._last} is not the last that the others made "
                f"with it, {last}: it went on by itself while they did without it. Restart it: it joins "
                "again, and its residual is lost, as the others have counted"
            )

    def _keep_residual(self, shared: Mapping[str, Tensor]) -> None:
        """With another shared model."""
        assert self._kept is not None
        preview = 1.0 if self._agreed is None else self._agreed.figures["preview"]
        for name in self.parameters:
            own, model = self._kept[f"own/{name}"], shared[name]
            waits = _finite(self._kept[f"mark/{name}"] - own).to(model.device)
            self._kept |= _models(name, model, waits, preview, own.dtype)

    # -- checkpoints ------------------------------------------------------------------------------------

    def load_if_all_begin(self) -> bool:
        """Once in the life of a replica, with the first group it has joined. Whether its state is now that of
        the checkpoint; it is not where others have trained and this one was brought up by them."""
        folder, sync = self.checkpoint, self.sync
        assert sync is not None
        if folder is None or self._last is not None:
            return False
        if not self._all_begin:
            self.checkpoint = None
            return False
        sync.load(folder)
        pipeline, group = self.pipeline, self._group
        kept = pipeline.kept()
        waits = [_finite(kept[f"mark/{name}"] - kept[f"own/{name}"]).double().norm() for name in pipeline.own]
        what = f"each residual after exchange {pipeline.step}"
        rows: Tensor = sync.engine.run(
            _gathered(torch.stack(waits).norm().reshape(1)), what, sync.replica.device
        )
        # As if the last exchange of the checkpoint had been made by these.
        self.accounts = Accounts(
            {
                identity: LastSeen(name, group, pipeline.step - 1, norm)
                for (identity, name), norm in zip(self._members, rows.flatten().tolist(), strict=True)
            }
        )
        self._agreed = Agreed(pipeline.step, pipeline.world, pipeline.figures(), list(pipeline.states))
        self._last, self.checkpoint = (group, pipeline.step - 1), None
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
            members = sync.engine.run(
                self._meeting(sync), f"the rendezvous of group {group}", sync.replica.device
            )
        except BaseException:
            sync.abandon()
            raise
        self.sync, self._group, self._members, self._kept = sync, group, members, None

    def _meeting(self, sync: PreparedSync) -> Program[list[tuple[int, str]]]:
        pipeline = sync.pipeline
        assert isinstance(pipeline, StepPipeline)
        mine = [self.identity, int(self._last is not None), int(self.checkpoint is not None)]
        rows = (yield AllGather(torch.tensor(mine, dtype=torch.int64, device=sync.replica.device))).tolist()
        texts = yield AllGather(as_bytes(self.name, sync.replica.device))
        part = self._part_for(pipeline)
        trained = sum(row[1] for row in rows)
        self._all_begin = trained == 0
        if self._all_begin and len({row[2] for row in rows}) > 1:
            without = [as_text(text) for row, text in zip(rows, texts, strict=True) if not row[2]]
            raise MismatchError(
                f"replica {self.name}: some replicas are to go on from a checkpoint, and {without[0]} is to "
                "begin again. Call load(folder) on all of them, or on none"
            )
        if 0 < trained < len(rows):
            yield from self._share_residual(part, pipeline, trained)
        restore(pipeline, part)
        sync.replica.compared = part.step
        sync.replica.views.renew()
        return [(row[0], as_text(text)) for row, text in zip(rows, texts, strict=True)]

    def _part_for(self, pipeline: StepPipeline) -> RankState:
        """What this replica goes on with, for as many as there are now."""
        part, agreed = capture(pipeline), self._agreed
        memories = part.memories if self._kept is None else dict(self._kept)
        if agreed is None:
            return RankState(part.step, part.figures, memories, part.states)
        figures = dict(agreed.figures)
        kinds = (("alike", "all", ""), ("gradients_alike", "gradients_all", "gradients_seen"))
        for alike, every, seen in kinds:
            counted = Coherence(figures[alike], figures[every], figures.get(seen, 0.0))
            counted = counted.among(agreed.world, pipeline.world)
            figures |= {alike: counted.alike, every: counted.all} | ({seen: counted.seen} if seen else {})
        fixed = pipeline.settings.preview
        share = Coherence(figures["alike"], figures["all"]).share(pipeline.world)
        figures["preview"] = share if fixed is None else fixed
        states = []
        for unit, state in zip(pipeline.units, agreed.states, strict=True):
            if isinstance(state, Mapping):
                state = checkpoint.fields_from_tensors(
                    pipeline.scheme.init_state(unit.sizes, agreed.world), state, ""
                )
            states.append(pipeline.scheme.init_state(unit.sizes, pipeline.world, state))
        return RankState(agreed.step, figures, memories, states)

    def _share_residual(self, part: RankState, pipeline: StepPipeline, trained: int) -> Program[None]:
        """Members that are new take the mean of the others' residuals."""
        memories = part.memories
        assert isinstance(memories, dict)
        for name, own in pipeline.own.items():
            model = memories[f"shared/{name}"]
            waits = _finite(memories[f"mark/{name}"] - memories[f"own/{name}"])
            total = yield AllReduce(torch.zeros_like(model) if self._last is None else waits)
            if self._last is None:
                memories |= _models(name, model, total / trained, part.figures["preview"], own.dtype)


def _models(name: str, shared: Tensor, waits: Tensor, preview: float, own: torch.dtype) -> dict[str, Tensor]:
    """The three of one parameter: x = w - a e, and m so that e is the residual."""
    x = (shared - preview * waits).to(own)
    return {f"shared/{name}": shared, f"own/{name}": x, f"mark/{name}": x.to(shared.dtype) + waits}


def _finite(waits: Tensor) -> Tensor:
    """What an optimizer moved to infinity or NaN counts as not moved."""
    return torch.where(waits.isfinite(), waits, 0.0)


def _gathered(mine: Tensor) -> Program[Tensor]:
    return (yield AllGather(mine))
