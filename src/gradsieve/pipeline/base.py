"""THE pipeline: what happens to a unit in a step, for every scheme alike.

    accumulate -> select, exchange -> apply -> commit

`program` is one unit's way through it, a generator like the schemes themselves: it runs on a real process
group (`comm/engine.py`) or on virtual ranks (`comm/lockstep.py`). What is accumulated and where the update
goes is described in `steps.py` and `gradients.py`.
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from gradsieve.comm.ops import Meter
from gradsieve.errors import ConfigError, GradsieveError, Malformed
from gradsieve.feedback.units import make_units
from gradsieve.pipeline.budget import Budget, Timer
from gradsieve.pipeline.exchange_settings import Exchange
from gradsieve.pipeline.frame import CHECKSUM_WORDS, Checksum, Frame, Timeline, sums_within
from gradsieve.pipeline.tags import IDLE, Tag, agree, is_notice_given, who_is_idle, words
from gradsieve.schemes.base import Scheme
from gradsieve.types import Ctx, Outcome, Program, Sparse, Vector, to_device, to_host

_log = logging.getLogger("gradsieve")

UNIT_CAP_MB = 100.0
"""Gradient in one unit of exchange. Larger than DDP's 25 MB: what travels is a small part of it, so that
rounds cost more than bytes; small enough for a large model's first units to go while backward still runs."""


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
    residual_scale: float = 1.0  # what a GradScaler multiplied residuals by
    rho: float = 1.0
    """Square of the mean gradient's length over that of a rank's own: `step_length.py`."""

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
        self.budget: Budget | None = None
        """In bits a parameter; None: what is sent follows from the density alone."""
        self.timer: Timer | None = None
        """Of a run whose budget is chosen by gradsieve."""
        self.stats = Stats(Meter(rank, world))
        self.observer: Observer | None = None
        self._recent_bits: deque[float] = deque(maxlen=20)
        self._flushes = False
        """Whether the pending exchange is one of everything, for `flush()`."""

    def bits(self) -> float:
        """Moved by this rank in the last exchange, a parameter and step."""
        return 8 * self.stats.meter.moved / (max(1, self.parameters) * self.settings.every)

    @property
    def mean_bits(self) -> float:
        """Of the last exchanges: one says little, as stripes are longer or shorter each time."""
        return fmean(self._recent_bits) if self._recent_bits else 0.0

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
        self.began_at = self.since
        acc, piggyback = self.offer(0)
        yield from self.exchange(0, acc, piggyback, Stats(Meter(self.rank, self.world)), False, call)

    def begin(self, tensors: Mapping[str, Tensor], everything: bool, moved: bool) -> None:
        """An exchange of all units begins, before their programs; `moved`: an optimizer stepped since the
        last one began."""

    def complete(self, tensors: Mapping[str, Tensor]) -> bool:
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
        """For each unit what the residual would be, had this rank moved as all did: `step_length.py`."""
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
        self._flushes = everything
        scheme = self.scheme.whole() if everything else self.scheme_of_this_step()
        tag = Tag(call, self.step, index, self.loads, self.began_at)
        said = words(tag, self.rank, self.idle, self.has_notice)
        said += [0.0] * CHECKSUM_WORDS
        message = torch.cat([piggyback, to_device(said, piggyback.dtype, piggyback.device)])

        program = self._run(scheme, acc, index, piggyback)
        frame = Frame(program, message, self._checksum, stats.meter, stats.timeline, index)
        try:
            outcome, ride = yield from frame.run()
        except Malformed as error:
            where = f"rank {self.rank}, unit {index} of {len(self.units)} in step {self.step}"
            raise Malformed(f"{where}: {error}") from error
        with stats.timeline.stage("exchange", index):
            # On an accelerator collectives return before they are done: here the host waits for them, so that
            # the measured cost of the exchange includes this wait.
            heard = to_host(ride[piggyback.numel() :]).tolist()
        yield from agree(tag, heard, self.rank, self.world, piggyback.device)
        self._hear(heard, index)
        stats.sent += outcome.update.count
        return outcome, ride[: piggyback.numel()]

    def _run(
        self, scheme: Scheme[Any], acc: Tensor | Vector, index: int, like: Tensor
    ) -> Program[Outcome[Any]]:
        if not self.units[index].n:
            outcome = yield from _nothing(like, self.states[index])
        else:
            context = Ctx(self.rank, self.world, self.step)
            outcome = yield from scheme.exchange(acc, self.states[index], context)
        if index == 0 and self.timer is not None and self.timer.is_last:
            yield from self.timer.gather()
        return outcome

    def _hear(self, heard: Sequence[float], index: int) -> None:
        """The sums of what all ranks said besides what they exchange."""
        sums_within(heard, f"rank {self.rank}: what was piggybacked on unit {index} in step {self.step}")
        self._checksum.check(heard[-CHECKSUM_WORDS:], self.step)
        self._hear_of(who_is_idle(heard))
        self.heard_notice |= is_notice_given(heard)

    def scheme_of_this_step(self) -> Scheme[Any]:
        """With what the budget buys, where there is one."""
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
        """The step was good on all ranks. The scheme learns nothing where everything was sent."""
        scheme = self.scheme.whole() if self._flushes else self.scheme_of_this_step()
        self.states = states if scheme.is_whole else scheme.next_states(states)
        if not self._flushes:
            self._recent_bits.append(self.bits())
        self.step += 1
        if self.observer is not None:
            self.observer.after_step()

    def seconds(self) -> float:
        """What this rank's last exchange took; 0 before the first."""
        return sum(span.stop - span.start for span in self.stats.timeline.spans if span.unit >= 0)


def _nothing(like: Tensor, state: Any) -> Program[Outcome[Any]]:
    """The exchange of a unit whose tensors all go dense."""
    yield from ()
    nothing = Sparse.full(like.new_empty(0))
    return Outcome(nothing, nothing, state)
