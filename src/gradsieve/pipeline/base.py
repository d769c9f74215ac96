"""What happens to a unit of parameters in an exchange, for every scheme alike.

    begin -> offer -> the scheme's exchange, in a frame -> apply -> the next states

`program` is one unit's way through it, a generator like the schemes themselves: it runs on a real process
group (`comm/engine.py`) or on virtual ranks (`comm/lockstep.py`). What is offered and where the update goes
is described in `steps.py` and `gradients.py`, which are the two kinds.
"""

from __future__ import annotations

import logging
import math
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from gradsieve.comm.ops import Meter
from gradsieve.errors import ConfigError, GradsieveError, Malformed
from gradsieve.models import Models
from gradsieve.pipeline.budget import ALL, Budget, Timer
from gradsieve.pipeline.exchange_settings import Exchange
from gradsieve.pipeline.frame import CHECKSUM_WORDS, Checksum, Frame, Timeline, sums_within
from gradsieve.pipeline.tags import CALLS, IDLE, Tag, agree, is_notice_given, who_is_idle, words
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.stripes import Stripes
from gradsieve.types import Ctx, Outcome, Program, Sparse, Vector, to_device, to_host
from gradsieve.units import Unit, make_units

_log = logging.getLogger("gradsieve")

# Gradient in one unit. Larger than DDP's 25 MB: what travels is a small part of it, so that rounds cost more
# than bytes; small enough for a large model's first units to go while backward still runs.
UNIT_CAP_MB = 100.0
TRAINING, FLUSH = CALLS[:2]
MakeModels: TypeAlias = Callable[[Mapping[str, Tensor], Sequence[Unit]], Models]


@dataclass(slots=True)
class Stats:
    """An exchange in figures."""

    meter: Meter
    timeline: Timeline = field(default_factory=Timeline)
    sent: int = 0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage."""
        return self.timeline.seconds()


@dataclass(slots=True)
class Pending:
    """An exchange of all units, from its beginning until it was applied."""

    call: str  # which call of the user's it belongs to
    since: int  # steps since the one with the exchange before
    stats: Stats
    offers: Any  # what the units' programs read
    results: list[Any] = field(default_factory=list)  # by unit, in order
    futures: list[Future[None]] = field(default_factory=list)  # of the units' programs
    # Whether no sum overflowed, from the moment on at which it was to be applied: nothing is applied twice,
    # also where that raised or the wait for it was interrupted.
    applied: Future[bool] | None = None

    @property
    def is_flush(self) -> bool:
        return self.call == FLUSH


class Observer(Protocol):
    def after_step(self) -> None:
        """An exchange was applied, on the thread that exchanges."""
        ...

    def close(self) -> None: ...


class Pipeline(ABC):
    """The exchange of one rank: units, memories, the scheme's states; and the programs that advance them."""

    exchanges_steps: ClassVar[bool]
    residual_scale: float = 1.0  # what a GradScaler multiplied residuals by
    rho: float = 1.0  # squared length of the mean gradient over that of a rank's own: `step_length.py`

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        scheme: Scheme[Any],
        settings: Exchange,
        rank: int,
        world: int,
        bucket_cap_mb: float = UNIT_CAP_MB,
        models: MakeModels = Models,
    ) -> None:
        if not parameters:
            raise ConfigError("there is no parameter that requires a gradient")
        self.parameters, self.optimizers = parameters, optimizers
        self.scheme, self.rank, self.world = scheme, rank, world
        self.settings: Exchange = settings
        self.elements = sum(tensor.numel() for tensor in parameters.values())
        small = 0 if scheme.lossless or scheme.round_robin else settings.small
        cap = sys.maxsize if scheme.whole_model else int(bucket_cap_mb * 2**20)
        self.units = make_units(parameters.items(), cap, small)
        self.selected = [unit for unit in self.units if not unit.is_dense]  # they come first
        self.dense = Stripes(density=self.dense_density(), values="exact")  # what dense units go by
        self.states = self.init_states(world)
        self.models = Models({}, ())  # where gradients are exchanged there is one, which nothing switches
        self.step = 0  # exchanges applied
        self.since = 0  # steps of all ranks since the one with the last exchange
        self.skipped = 0  # steps that were skipped because a gradient was not finite
        self.last_step_good = True
        self.idle = 0  # exchanges in a row that began without a step of this rank since the one before
        self.loads = 0  # how often another model was loaded into the parameters
        self.has_notice = self.heard_notice = False  # whether this rank will be stopped; or any rank
        self._idle_ranks = ""
        self._checksum = Checksum(rank, world)
        self.budget: Budget | None = None  # None: what is sent follows from the density alone
        self.timer: Timer | None = None  # of a run whose budget is chosen by gradsieve
        self.last = Pending(TRAINING, 0, self._stats(), None)  # the last exchange that was completed
        self.observer: Observer | None = None
        self._recent_bits: deque[float] = deque(maxlen=20)
        self.set_up(models)

    @abstractmethod
    def set_up(self, models: MakeModels) -> None:
        """Make what this kind of exchange remembers."""

    def _stats(self) -> Stats:
        return Stats(Meter(self.rank, self.world))

    @property
    def stats(self) -> Stats:
        return self.last.stats

    def bits(self) -> float:
        """Return what this rank moved in the last exchange, in bits a parameter and step."""
        return 8 * self.stats.meter.moved / (max(1, self.elements) * self.settings.every)

    @property
    def mean_bits(self) -> float:
        """The mean of the last exchanges: stripes are longer or shorter each time."""
        return fmean(self._recent_bits) if self._recent_bits else 0.0

    @property
    def timing(self) -> Timer | None:
        """The timer, until the budget is chosen."""
        return self.timer if self.timer is not None and self.timer.number < ALL else None

    # -- an exchange ------------------------------------------------------------------------------------

    def begins_exchange(self) -> bool:
        """Count a step of all ranks; whether it is the last of its period, which exchanges."""
        self.since = (self.since + 1) % self.settings.every
        return self.since == 0

    @property
    def is_exchange_due(self) -> bool:
        """Whether the pending exchange is to be completed by now: in the same step on all ranks."""
        return self.since >= self.settings.overlap - 1

    def begin(
        self, call: str = TRAINING, has_notice: bool = False, gradients: Mapping[str, Tensor] | None = None
    ) -> Pending:
        """Begin an exchange of all units, before their programs. `gradients`: flat, by name, filled while
        backward runs; without them `.grad` is exchanged, where gradients are."""
        self._refuse_sparse_gradients()
        self.has_notice = has_notice
        return Pending(call, self.since, self._stats(), self.offers(call, gradients))

    @abstractmethod
    def offers(self, call: str, gradients: Mapping[str, Tensor] | None) -> Any:
        """Return what the programs of this exchange read."""

    @abstractmethod
    def program(self, pending: Pending, index: int) -> Program[None]:
        """Exchange unit `index`. Units go in order."""

    @abstractmethod
    def complete(self, pending: Pending) -> bool:
        """Apply the exchange after the programs of all units. False if a sum overflowed, on all ranks."""

    def finish(self, pending: Pending) -> bool:
        """Complete the exchange, and refresh this rank's model, where no optimizer moves in between."""
        good = self.complete(pending)
        self.rebase()
        return good

    @abstractmethod
    def probe_offer(self) -> tuple[Tensor | Vector, Tensor]:
        """Return what an exchange of the first unit would be given, and its piggyback. Nothing changes."""

    def handshake(self, call: str) -> Program[None]:
        """Find out whether all ranks make this call, by an exchange as the next one would be, of which
        nothing is kept. A rank that went on training answers it with its own exchange, and both raise."""
        pending = Pending(call, self.since, self._stats(), None)
        yield from self.exchange(pending, 0, *self.probe_offer(), everything=False)

    def exchange(
        self, pending: Pending, index: int, acc: Tensor | Vector, piggyback: Tensor, everything: bool
    ) -> Program[tuple[Outcome[Any], Tensor]]:
        """Run the scheme's exchange of a unit; returns its outcome, and the sum of the piggyback."""
        scheme, stats = self.scheme_of(self.units[index], everything), pending.stats
        tag = Tag(CALLS.index(pending.call), self.step, index, self.loads, pending.since)
        own = [*words(tag, self.rank, self.idle, self.has_notice), *[0.0] * CHECKSUM_WORDS]
        message = torch.cat([piggyback, to_device(own, piggyback.dtype, piggyback.device)])
        program = self._run(scheme, acc, index, piggyback)
        frame = Frame(program, message, self._checksum, stats.meter, stats.timeline, index)
        try:
            outcome, total = yield from frame.run()
        except Malformed as error:
            where = f"rank {self.rank}, unit {index} of {len(self.units)} in step {self.step}"
            raise Malformed(f"{where}: {error}") from error
        with stats.timeline.stage("exchange", index):
            # On an accelerator collectives return before they are done: here the host waits for them, so that
            # the measured cost of the exchange includes this wait.
            sums = to_host(total[piggyback.numel() :]).tolist()
        yield from agree(tag, sums, self.rank, self.world, piggyback.device)
        sums_within(sums, f"rank {self.rank}: what was piggybacked on unit {index} in step {self.step}")
        self._checksum.check(sums[-CHECKSUM_WORDS:], self.step)
        self._warn_of_idle(who_is_idle(sums))
        self.heard_notice |= is_notice_given(sums)
        stats.sent += outcome.update.count
        return outcome, total[: piggyback.numel()]

    def _run(
        self, scheme: Scheme[Any], acc: Tensor | Vector, index: int, like: Tensor
    ) -> Program[Outcome[Any]]:
        if self.units[index].n:
            context = Ctx(self.rank, self.world, self.step)
            outcome = yield from scheme.exchange(acc, self.states[index], context)
        else:
            nothing = Sparse.full(like.new_empty(0))
            outcome = Outcome(nothing, nothing, self.states[index])
        if index == 0 and (timing := self.timing) is not None and timing.is_last:
            yield from timing.gather()
        return outcome

    def scheme_of(self, unit: Unit, everything: bool) -> Scheme[Any]:
        scheme = self.dense if unit.is_dense else self.scheme_of_this_step()
        return scheme.whole() if everything else scheme

    def scheme_of_this_step(self) -> Scheme[Any]:
        """Return the scheme with what the budget buys, if there is one."""
        return self.scheme

    def dense_density(self) -> float:
        """Return the part of small tensors that is sent in an exchange."""
        return 1.0

    def init_states(self, world: int, previous: Sequence[Any] = ()) -> list[Any]:
        """Return the schemes' states for so many ranks, given those of another number, if there are any."""
        before = previous or [None] * len(self.units)
        schemes = (self.dense if unit.is_dense else self.scheme for unit in self.units)
        return [
            scheme.init_state(unit.sizes, world, state)
            for scheme, unit, state in zip(schemes, self.units, before, strict=True)
        ]

    def check_order(self, pending: Pending, index: int) -> None:
        """Raise if an earlier unit has failed: no later one is applied."""
        if index != len(pending.results):
            raise GradsieveError(
                f"rank {self.rank}: unit {len(pending.results)} of step {self.step} has failed, so that "
                f"unit {index} is not exchanged"
            )

    def _warn_of_idle(self, ranks: str) -> None:
        if ranks and ranks != self._idle_ranks:
            _log.warning(
                "rank %d, step %d: %s took no step between the last %d exchanges. Gradients there are not "
                "finite (look at input and loss), or the optimizer there is not a torch.optim.Optimizer, or "
                "more backwards than that belong to a step: all but the last go into ddp.no_sync()",
                self.rank,
                self.step,
                ranks,
                IDLE,
            )
        self._idle_ranks = ranks

    def commit(self, pending: Pending) -> None:
        """Go on to the next step: this one was good on all ranks. The scheme learns nothing where everything
        was sent."""
        scheme = self.scheme.whole() if pending.is_flush else self.scheme_of_this_step()
        self.states, count = [outcome.state for outcome in self.outcomes], len(self.selected)
        if count and not scheme.is_whole:
            self.states[:count] = scheme.next_states(self.states[:count])
        if not pending.is_flush:
            self._recent_bits.append(self.bits())
        self.step += 1
        if self.observer is not None:
            self.observer.after_step()

    @property
    def outcomes(self) -> list[Outcome[Any]]:
        """The outcomes of the last exchange, by unit."""
        return [result.outcome for result in self.last.results]

    # -- what only one of the kinds does ----------------------------------------------------------------

    def choose_budget(self, fixed: Budget | None, is_chosen: bool, may_wait: bool) -> None:
        """Send as much as the user gave, if he gave a budget. `is_chosen`: time the first exchanges and
        choose by them; `may_wait`: the period, too."""

    def follow(self, budget: Budget) -> None:
        """Send so much from the next exchange on."""

    def note_loss_scale(self, scale: float) -> None:
        """Note what a GradScaler multiplies gradients by in this step."""

    def keep_unused(self) -> None:
        """Keep what was sent for parameters that no rank used: DDP would drop it."""

    def note_step(self, is_finite: bool) -> None:
        """Note whether the gradients are finite by which an optimizer is about to step."""

    def before_update(self, optimizer: Any, names: Set[str]) -> None:
        """Prepare a step of these parameters, by gradients that are finite or none at all."""

    def after_update(self) -> None:
        """Finish the step that the optimizer has taken."""

    def at_rest(self, names: Set[str]) -> None:
        """Do what is due in optimizers' states of these parameters before their next step, so that it is
        saved with them. No optimizer is stepping them."""

    def rebase(self, names: Set[str] | None = None) -> None:
        """Write this rank's model where that is due: in these parameters, or in all."""

    def reset_to_shared(self) -> None:
        """Go on from the shared model: another one was loaded on all ranks."""
        self.loads += 1
        self.models.reset_to_shared()

    # -- state ------------------------------------------------------------------------------------------

    @abstractmethod
    def memories(self) -> dict[str, Tensor]:
        """Return what this rank remembers between steps, besides the scheme's states: views by
        kind/parameter."""

    def kept(self) -> dict[str, Tensor]:
        """Return all vectors of a checkpoint: the memories, and the parameters that only this rank has."""
        return self.memories()

    def samples(self) -> list[Tensor]:
        """Return the sampled gradients of the next exchange: for each unit a vector, as long each time."""
        return []

    def after_load(self, samples: Sequence[Tensor], mean: Sequence[Tensor]) -> None:
        """Take these as well, after step, figures and memories were loaded."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Return the numbers that a checkpoint holds."""

    @abstractmethod
    def set_figures(self, figures: Mapping[str, float]) -> None: ...

    def figures_among(
        self, figures: Mapping[str, float], old: int, residuals_differ: bool
    ) -> dict[str, float]:
        """Return the figures that another number of ranks would have had."""
        return dict(figures)

    @abstractmethod
    def replicated(self) -> tuple[dict[str, Tensor], list[float]]:
        """Return the tensors and the figures that are the same bits on all ranks."""

    def report(self) -> dict[str, float]:
        """Return figures for `metrics()`."""
        return {}

    def reports(self) -> list[Mapping[str, float]]:
        """Return the scheme's own figures of each unit that it selects from."""
        return [self.scheme.report(state) for state in self.states[: len(self.selected)]]

    @abstractmethod
    def residuals(self) -> Iterator[Tensor]:
        """Yield what this rank has not sent, unit by unit."""

    def residual_norm(self) -> float:
        return math.hypot(*(float(residual.norm()) for residual in self.residuals()))

    def remaining_norm(self, pending: Pending) -> float:
        """Return the norm that the residual will have once this exchange is applied."""
        return self.residual_norm()

    def _refuse_sparse_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ConfigError(f"parameter {name!r} has a sparse gradient: use Embedding(sparse=False)")
