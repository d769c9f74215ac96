"""THE pipeline: what happens to a unit in a step, for every scheme alike.

    accumulate -> select, exchange -> apply -> commit

`program` is one unit's way through it, a generator like the schemes themselves: it runs on a real process
group (`comm/c10d.py`) or on virtual ranks (`comm/lockstep.py`). What is accumulated and where the update
goes is described in `steps.py` and `gradients.py`.
"""

from __future__ import annotations

import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from gradsieve.comm.links import Links
from gradsieve.comm.meter import Meter
from gradsieve.comm.ops import Op
from gradsieve.comm.rounds import Rounds
from gradsieve.errors import ConfigError, GradsieveError, Malformed
from gradsieve.feedback.piggyback import carry
from gradsieve.feedback.units import make_units
from gradsieve.pipeline.budget import Budget, Times
from gradsieve.pipeline.checksum import WORDS as CHECKSUM_WORDS
from gradsieve.pipeline.checksum import Checksum
from gradsieve.pipeline.costs import dense_seconds
from gradsieve.pipeline.exchange_settings import Exchange
from gradsieve.pipeline.fallback import Fallback
from gradsieve.pipeline.round_robin import Turns
from gradsieve.pipeline.tags import IDLE, WORDS, Tag, agree, is_notice_given, who_is_idle, words
from gradsieve.schemes.base import Scheme
from gradsieve.telemetry import Timeline
from gradsieve.types import Ctx, Outcome, Program, Result, Sparse, Vector, by_way_of, to_device, to_host
from gradsieve.wire.check import sums_within

_log = logging.getLogger("gradsieve")

UNIT_CAP_MB = 100.0
"""Gradient in one unit of exchange. Larger than DDP's 25 MB: what travels is a small part of it, so that
rounds cost more than bytes; small enough for a large model's first units to go while backward still runs."""


Layer: TypeAlias = Callable[[Program[Any]], Program[Any]]
"""A program around another one, whose ops and replies pass through it."""


@dataclass(slots=True)
class Stats:
    """The last step in figures."""

    meter: Meter
    timeline: Timeline = field(default_factory=Timeline)
    sent: int = 0

    @property
    def seconds(self) -> dict[str, float]:
        """By stage."""
        return self.timeline.seconds()


@dataclass(slots=True)
class Way:
    """How a unit is exchanged."""

    scheme: Scheme[Any]
    """At the density of this step."""
    fallback: Fallback | None = None
    dense: bool = False
    was_dense: bool = False
    """In this exchange, and in the last one that was applied."""
    mean_seconds: Sequence[float] = ()
    """Seconds that were piggybacked, means over ranks: see `_seconds_to_send`."""


class Memory(Protocol):
    """What outlives a step, of one unit."""

    def by_kind(self) -> dict[str, dict[str, Tensor]]:
        """Flat views by kind and parameter."""
        ...


class Observer(Protocol):
    """Whoever looks at the steps of a pipeline."""

    def after_step(self) -> None:
        """A step was committed, on the thread that exchanges."""
        ...

    def close(self) -> None: ...


class Pipeline(ABC):
    """The state of one rank: units, memories, scheme state; and the programs that advance it."""

    exchanges_steps: ClassVar[bool]
    """Whether `program` is given flat parameters or flat gradients."""
    rho: float = 1.0
    """Square of the mean gradient's length over that of a rank's own: `feedback/step_length.py`."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        scheme: Scheme[Any],
        rank: int,
        world: int,
        bucket_cap_mb: float,
        settings: Exchange,
    ) -> None:
        named = list(parameters)
        if not named:
            raise ConfigError("there is no parameter that requires a gradient")
        self.scheme, self.rank, self.world = scheme, rank, world
        self.settings: Exchange = settings
        self.parameters = sum(tensor.numel() for _, tensor in named)
        small = 0 if scheme.lossless or scheme.round_robin else settings.small
        self.units = make_units(
            named, sys.maxsize if scheme.whole_model else int(bucket_cap_mb * 2**20), small
        )
        self.states = [scheme.init_state(unit.sizes, world) for unit in self.units]
        self.step = 0
        """Exchanges committed."""
        self.since = 0
        """Steps of all ranks since the one with the last exchange: see `begins_exchange`."""
        self.began_at = 0
        """What `since` was when the pending exchange began."""
        self.tentative = False
        """Whether that exchange began with a forward, so that no rank knows yet whether all take part."""
        self.skipped = 0
        """Steps skipped because a gradient was not finite."""
        self.last_step_good = True
        self.idle = 0
        """Exchanges in a row that began without a step of this rank since the one before."""
        self.loads = 0
        """How often another model was loaded into the parameters."""
        self.has_notice = self.heard_notice = False
        """Whether this rank says to the others that its time is up; and whether any rank has said so."""
        self._idle_ones = ""
        self._checksum = Checksum(rank, world)
        self.rounds = Rounds(rank, world)
        """How collectives are carried: by the engine itself, until somebody knows the links."""
        self.budget: Budget | None = None
        """In bits a parameter; None: what is sent follows from the density alone."""
        self.times = Times()
        """This rank's, of the last step."""
        self.stats = Stats(Meter(rank, world))
        self._ways = [Way(scheme) for _ in self.units]
        self.observer: Observer | None = None
        self.turns = Turns()
        self._flushes = False
        """Whether the pending exchange is one of everything, for `flush()`."""

    def bits(self) -> float:
        """Moved by this rank in the last exchange, a parameter and step."""
        return 8 * self.stats.meter.moved / (max(1, self.parameters) * self.settings.every)

    @property
    def is_last_of_period(self) -> bool:
        """Whether the next step of all ranks is the one of its period that exchanges."""
        return (self.since + 1) % self.settings.every == 0

    def begins_exchange(self) -> bool:
        """One more step of all ranks begins: whether it is the one of its period that exchanges, the last."""
        self.since = (self.since + 1) % self.settings.every
        return self.since == 0

    @property
    def is_exchange_due(self) -> bool:
        """Whether an exchange that began in the last step which begins one is to be completed by now: in the
        same step on all ranks."""
        return self.since >= self.settings.overlap - 1

    @abstractmethod
    def program(
        self, index: int, tensors: Mapping[str, Tensor], everything: bool = False, call: int = 0
    ) -> Program[None]:
        """Exchange unit `index`. Units go in order; `everything` sends all of it, whatever the density.
        `call` says for which call of the user's (`tags.CALLS`)."""

    @abstractmethod
    def offer(self, index: int) -> tuple[Tensor | Vector, Tensor]:
        """As much as an exchange of this unit would be given, and its piggyback; nothing is changed."""

    def handshake(self, call: int) -> Program[None]:
        """Find out whether all ranks make this call, by an exchange as the next one would be, of which
        nothing is kept. A rank that went on training answers it with its own exchange, and both raise."""
        before, self.began_at, self.tentative = replace(self._ways[0]), self.since, False
        acc, piggyback = self.offer(0)
        yield from self.exchange(0, acc, piggyback, Stats(Meter(self.rank, self.world)), False, call)
        self._ways[0] = before

    def begin(self, tensors: Mapping[str, Tensor], everything: bool, moved: bool) -> None:
        """An exchange of all units begins, before their programs; `moved`: an optimizer stepped since the
        last one began."""

    def complete(self, tensors: Mapping[str, Tensor], names: Set[str] = frozenset()) -> bool:
        """After the programs of all units: take what the exchange gave, if they have not. False where a sum
        overflowed, so that all ranks left it."""
        return True

    def needs_rebase(self, names: Set[str]) -> bool:
        """Whether `rebase` has anything to write in these parameters."""
        return False

    def rebase(self, names: Set[str] | None = None) -> None:
        """Write this rank's model where that is due: in these parameters, or in all."""

    def note_loss_scale(self, scale: float) -> None:
        """What a GradScaler multiplies gradients by in this step."""

    def memories(self) -> dict[str, Tensor]:
        """What this rank remembers between steps, besides the scheme's states: views by kind/parameter."""
        return {
            f"{kind}/{name}": part
            for memory in self.remembering()
            for kind, parts in memory.by_kind().items()
            for name, part in parts.items()
        }

    def kept(self) -> dict[str, Tensor]:
        """The same with what nobody else can save: all that a checkpoint holds of vectors."""
        return self.memories()

    def noted(self) -> list[Tensor]:
        """What was seen and the next exchange sends: for each unit a vector, as long in every step."""
        return []

    def common(self) -> list[Tensor]:
        """For each unit what the residual would be, had this rank moved as all did: `shared_momentum.py`."""
        return []

    @abstractmethod
    def remembering(self) -> Sequence[Memory]: ...

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Numbers that outlive a step and go into a checkpoint."""

    @abstractmethod
    def set_figures(self, figures: Mapping[str, float]) -> None: ...

    @property
    @abstractmethod
    def outcomes(self) -> list[Outcome[Any]]:
        """Of the last exchange, by unit."""

    @abstractmethod
    def waiting(self) -> Iterator[Tensor]:
        """What this rank has not sent, unit by unit."""

    def exchange(
        self, index: int, acc: Tensor | Vector, piggyback: Tensor, stats: Stats, everything: bool, call: int
    ) -> Program[tuple[Outcome[Any], Tensor]]:
        """The scheme's exchange of a unit, at the density of this step, and the sum of the piggyback."""
        way, self._flushes = self._ways[index], everything
        way.dense = everything or (way.fallback is not None and way.fallback.goes_dense)
        scheme = self.scheme.whole() if way.dense else self.scheme_of_this_step()
        tag = Tag(call, self.step, index, self.loads, self.began_at, int(self.tentative))
        said = words(tag, self.rank, self.idle, self.has_notice)
        said += [*self._seconds_to_send(index, way), *[0.0] * CHECKSUM_WORDS]
        message = torch.cat([piggyback, to_device(said, piggyback.dtype, piggyback.device)])

        program: Program[Any] = self._run(scheme, acc, index, piggyback)
        for layer in self._layers(index, message, stats):
            program = layer(program)
        outcome: Outcome[Any]
        ride: Tensor
        outcome, ride = yield from program

        with stats.timeline.stage("exchange", index):
            # On an accelerator collectives return before they are done: here the host waits for them, so that
            # the measured cost of the exchange includes this wait.
            heard = to_host(ride[piggyback.numel() :]).tolist()
        yield from agree(tag, heard, self.rank, self.world, piggyback.device)
        self._hear(heard, index)
        stats.sent += outcome.update.count
        way.scheme, way.mean_seconds = scheme, [each / self.world for each in heard[WORDS:-CHECKSUM_WORDS]]
        return outcome, ride[: piggyback.numel()]

    def _run(
        self, scheme: Scheme[Any], acc: Tensor | Vector, index: int, like: Tensor
    ) -> Program[Outcome[Any]]:
        if not self.units[index].n:
            return _nothing(like, self.states[index])
        return scheme.exchange(acc, self.states[index], Ctx(self.rank, self.world, self.step))

    def _layers(self, index: int, message: Tensor, stats: Stats) -> Sequence[Layer]:
        """What the scheme's program is wrapped in, from the inside out: its ops go through all of these to
        the engine, and the replies come back the other way."""
        where = f"rank {self.rank}, unit {index} of {len(self.units)} in step {self.step}"
        return (
            # The message is part of an all-reduce before the checksum writes its words at the end of it.
            lambda program: carry(program, message),
            # It covers whole collectives: it holds however often rounds pass a part of one on.
            lambda program: self._checksum.watched(program, message.dtype),
            # Rounds are a part of the exchange: their time counts.
            lambda program: _timed(program, stats.timeline, index),
            self.rounds.carried,
            # What the engine is really asked for, round by round.
            lambda program: _counted(program, stats.meter),
            # Whoever of the above found something malformed says where.
            lambda program: _located(program, where),
        )

    def _hear(self, heard: Sequence[float], index: int) -> None:
        """The sums of what all ranks said besides what they exchange."""
        sums_within(heard, f"rank {self.rank}: what was piggybacked on unit {index} in step {self.step}")
        self._checksum.check(heard[-CHECKSUM_WORDS:], self.step)
        self._hear_of(who_is_idle(heard))
        self.heard_notice |= is_notice_given(heard)

    def scheme_of_this_step(self) -> Scheme[Any]:
        """With what the budget buys, where there is one, and what the settings of the exchange make of it."""
        usual = self._within_budget()
        density = self.settings.density_at(self.step, usual.density)
        if density == usual.density:
            return usual
        return usual.whole() if density == 1.0 else replace(usual, density=density)

    def _within_budget(self) -> Scheme[Any]:
        return self.scheme

    def in_order(self, index: int, done: int) -> None:
        """After a unit that failed, no later one is applied."""
        if index != done:
            raise GradsieveError(f"rank {self.rank}: an earlier unit of this step has failed")

    def _hear_of(self, idle_ones: str) -> None:
        if idle_ones and idle_ones != self._idle_ones:
            _log.warning(
                "rank %d, step %d: %s took no step between the last %d exchanges. Gradients there are not "
                "finite (look at input and loss), or what steps there is not a torch.optim.Optimizer",
                self.rank,
                self.step,
                idle_ones,
                IDLE,
            )
        self._idle_ones = idle_ones

    def apply(self, states: list[Any]) -> None:
        """The step was good on all ranks. The scheme learns nothing from units that sent everything."""
        sparse = [way.scheme for way in self._ways if not way.scheme.is_whole]
        self.states = sparse[0].apply(states) if sparse else states
        for index, way in enumerate(self._ways):
            if way.fallback is not None and any(way.mean_seconds):
                last, way.fallback = way.fallback, way.fallback.after(way.mean_seconds[0], way.was_dense)
                if last.goes_dense != way.fallback.goes_dense and self.rank == 0:
                    _log.info("step %d, unit %d of %d: %s", self.step, index, len(self.units), way.fallback)
            way.was_dense = way.dense
        mean_seconds = self._ways[0].mean_seconds
        if self.budget is not None and mean_seconds and not self._ways[0].dense:
            self.budget = self.budget.after(Times(*mean_seconds))
            if self.rank == 0 and (said := self.budget.says(self.world)):
                _log.info("step %d: %s", self.step, said)
        if not self._flushes:
            self.turns.add(self.bits(), is_over=getattr(self.states[0], "cursor", 0) == 0)
        self.step += 1
        if self.observer is not None:
            self.observer.after_step()

    def fall_back(self, links: Links) -> None:
        """From now on, dense where that is faster."""
        for way, unit in zip(self._ways, self.units, strict=True):
            words = unit.n * unit.dtype.itemsize // 4
            way.fallback = Fallback(dense_seconds(words, links, self.world))

    def _seconds_to_send(self, index: int, way: Way) -> Sequence[float]:
        if self.budget is not None:
            return self.times if index == 0 else ()
        return [self.seconds(index)] if way.fallback is not None else []

    def seconds(self, index: int | None = None) -> float:
        """What this rank's last exchange took, of one unit or of all; 0 before the first."""
        spans = self.stats.timeline.spans
        own = (span for span in spans if (span.unit == index if index is not None else span.unit >= 0))
        return sum(span.stop - span.start for span in own)


def _nothing(like: Tensor, state: Any) -> Program[Outcome[Any]]:
    """The exchange of a unit whose tensors all go dense."""
    yield from ()
    nothing = Sparse.full(like.new_empty(0))
    return Outcome(nothing, nothing, state)


def _located(program: Program[Result], where: str) -> Program[Result]:
    try:
        return (yield from program)
    except Malformed as error:
        raise Malformed(f"{where}: {error}") from error


def _timed(program: Program[Result], timeline: Timeline, unit: int) -> Program[Result]:
    """Time spent waiting for replies is the exchange, the rest is the scheme's own."""
    reply: Tensor | None = None
    while True:
        with timeline.stage("select", unit):
            try:
                op = program.send(reply)  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as end:
                result: Result = end.value
                return result
        start = time.perf_counter()
        reply = yield op
        timeline.add("exchange", unit, start)


def _counted(program: Program[Result], meter: Meter) -> Program[Result]:
    """What is really asked of the engine."""

    def perform(op: Op) -> Program[Tensor]:
        meter.count(op)
        return (yield op)

    return by_way_of(program, perform)
