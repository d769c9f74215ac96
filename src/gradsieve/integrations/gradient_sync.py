"""`GradientSync`: the pipeline on a process group, for any training loop.

    sync = gradsieve.GradientSync(model.named_parameters(), optimizer, density=0.001)
    loss.backward()
    sync.reduce()
    optimizer.step()

`gradsieve.attach` (`ddp.py`) is the same behind DistributedDataParallel's communication hook.

What outlives a step is changed on the engine's thread alone, behind the exchanges it belongs to: Ctrl-C
interrupts the wait for it, never the change.
"""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import wait
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from gradsieve import kernels
from gradsieve.comm.c10d import Engine
from gradsieve.errors import ConfigError, GradsieveError, MismatchError
from gradsieve.feedback.units import flat_view
from gradsieve.integrations import folder as files
from gradsieve.integrations import replicas, saving, sayings
from gradsieve.integrations.advice import Advisor, signs
from gradsieve.integrations.budgets import know_the_links
from gradsieve.integrations.fencing import Stamp, Writer
from gradsieve.integrations.metrics import metrics
from gradsieve.integrations.moments import make_equal
from gradsieve.integrations.optimizers import Optimizers, as_list, refuse_sharded, refuse_unfrozen
from gradsieve.integrations.preemption import Notice
from gradsieve.integrations.stopwatch import Stopwatch
from gradsieve.integrations.two_models import TwoModels
from gradsieve.integrations.under_way import UnderWay
from gradsieve.integrations.undoing import undo
from gradsieve.presets import Preset, choose, choose_scheme
from gradsieve.schemes.base import Scheme
from gradsieve.sync import UNIT_CAP_MB, GradientPipeline, StepPipeline
from gradsieve.sync.budget import Fixed
from gradsieve.sync.fitted import Fitted
from gradsieve.sync.tags import CALLS, UnmatchedError
from gradsieve.telemetry import Span

VERIFY_EVERY = 100
"""Steps between two comparisons of the replicas' fingerprints: a few bytes and one pass over the model."""
_TRIES = 4
"""Of a call that meets tentative exchanges: one is enough with honest ranks."""
_attached: weakref.WeakSet[GradientSync] = weakref.WeakSet()
_attaching = threading.Lock()
"""Several ranks may be threads of one process."""


class GradientSync:
    """Sparse exchange between the ranks of a group: residuals, the shared model, the scheme's state."""

    part = ""  # for names of files: of which part of the model, where ranks hold parts
    models: TwoModels | None = None
    _optimizers: Optimizers | None = None
    _notice: Notice | None = None

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        optimizer: Any,
        *,
        scheme: str | Scheme[Any] | None = None,
        density: float | None = None,
        bits: float | None = None,
        every: int = 1,
        preset: Preset = "default",
        scaler: torch.amp.GradScaler | None = None,
        dense_if_faster: bool = True,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = UNIT_CAP_MB,
    ) -> None:
        """`parameters` with their names; the ranks of `group`, or all; `bucket_cap_mb` is exchanged together.
        Other settings are those of `attach`."""
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised: call init_process_group() first")
        named = dict(parameters)
        self.held = {name: p for name, p in named.items() if p.requires_grad}  # by user and optimizers
        self.parameters = self.parts_of(self.held)
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        self.scheme = choose_scheme(scheme, density, bits, preset)
        self.fixed = None if bits is None else Fixed(bits)
        self._spends = scheme is None and density is None
        self.treatment = choose(preset, self.scheme, every)
        self._given = as_list(optimizer)
        refuse_sharded(self._given, self.treatment.exchange)
        self._refuse_taken()
        self._scaler = scaler
        self._users = weakref.ref(group or dist.group.WORLD)
        self._under_way: UnderWay | None = None
        self.compared = 0  # the step after which replicas were last compared
        self._moved = True  # whether a step was taken since the last exchange began
        self.is_closed = self.is_listening = False
        self._writer = Writer()
        self._is_preempted = False
        self.watch = Stopwatch()
        kernels.active()  # numba is loaded here and not in the first step
        self.engine = Engine(group)
        try:
            self._set_up(bucket_cap_mb, dense_if_faster and preset != "paper")
            self.enter()
            sayings.what_is_set(self)
        except BaseException:
            undo(self)
            raise
        with _attaching:
            _attached.add(self)

    def _refuse_taken(self) -> None:
        """A parameter has one owner: who else would know which model it holds?"""
        mine = {id(parameter): name for name, parameter in self.held.items()}
        with _attaching:
            others = list(_attached)
        for other in others:
            if not other.is_listening or "steps" not in (self.treatment.exchange, other.treatment.exchange):
                continue
            taken = [mine[id(parameter)] for parameter in other.held.values() if id(parameter) in mine]
            if taken:
                raise ConfigError(
                    f"{', '.join(taken[:4])} belongs to another model to which a sync is attached: put both "
                    "models into one module and wrap that in DistributedDataParallel, or use "
                    "preset=gradsieve.Treatment(exchange='gradients') for both"
                )

    def parts_of(self, held: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What is exchanged: all of it, where all ranks of the group hold the same."""
        return held

    def _set_up(self, cap_mb: float, dense_if_faster: bool) -> None:
        rank, world = self.engine.rank, self.engine.world
        self.fitted = Fitted(
            self.parameters, self._given, self.scheme, self.treatment, rank, world, cap_mb, self.held
        )
        self.pipeline = self.fitted.pipeline
        self.device = self.pipeline.units[0].device
        steps = self.pipeline if isinstance(self.pipeline, StepPipeline) else None
        self.models = None if steps is None else self.two_models(steps)
        if world > 1 and not self.scheme.silent:
            self.engine.agree_on_secret(self.device)
            replicas.start_alike(self, dense_if_faster)
            know_the_links(self, self._spends and self.exchanges_steps, dense_if_faster)
        adaptive = not all(isinstance(one, torch.optim.SGD) for one in self._given)
        self._advisor = Advisor(self.scheme, adaptive, rank)

    def two_models(self, pipeline: StepPipeline) -> TwoModels:
        return TwoModels(self.parameters, pipeline)

    def enter(self) -> None:
        """Listen to the optimizers that step the model."""
        self.watch.forget()
        self.is_listening = True
        self._optimizers = Optimizers(self.held, self)

    def leave(self) -> None:
        """Listen no more. The parameters hold this rank's own model."""
        self.is_listening = False
        if self._optimizers is not None:
            self._optimizers.close()
        if self.models is not None:
            self.models.show_own()

    @property
    def exchanges_steps(self) -> bool:
        return isinstance(self.pipeline, StepPipeline)

    # -- a step ---------------------------------------------------------------------------------------

    def reduce(self) -> bool:
        """Exchange, between backward and the optimizer's step; False where the step is to be skipped.

        What the optimizer moved before is exchanged; with `exchange="gradients"`, gradients in `.grad`.
        """
        if self.scheme.silent:
            return True
        self.begin_step()
        self.start_if_due()
        self.take_over_if_ripe(self.parameters.keys())
        if self.models is not None:
            self.models.raise_versions()
        return self.pipeline.last_step_good

    def start_if_due(self) -> None:
        """A step of all ranks begins."""
        if self.pipeline.begins_exchange():
            self.start_exchange()

    def start_exchange(self, call: str = CALLS[0], tentative: bool = False) -> None:
        """Of all units; what it is given is read. For `flush()`, all that waits."""
        self.take_over()
        self.pipeline.tentative = tentative
        self.pipeline.has_notice = self._has_notice
        refuse_unfrozen(self._frozen, self._where)
        if self.exchanges_steps:
            self.pipeline.idle = 0 if self._moved else self.pipeline.idle + 1
            self._moved = False
        self.pipeline.times = self.watch.begin()
        tensors = self.fitted.tensors()
        if isinstance(self.pipeline, StepPipeline) and self.treatment.late > 1:
            self.pipeline.put_aside(tensors, call == "flush()")
        futures = []
        for index, unit in enumerate(self.pipeline.units):
            own = {slot.name: tensors[slot.name] for slot in unit.slots}
            program = self.pipeline.program(index, own, call == "flush()", CALLS.index(call))
            futures.append(self.engine.submit(program, self.describe(index), unit.device))
        self._under_way = UnderWay(tensors, futures, tentative)

    def take_over_if_ripe(self, names: Set[str] = frozenset()) -> None:
        """In the step in which all ranks do; before it, nothing waits for the exchange under way."""
        if self._under_way is None or self.pipeline.is_ripe:
            self.take_over(names)
        if self.pipeline.is_ripe:
            self._is_preempted = self.pipeline.heard_notice

    def take_over(self, names: Set[str] = frozenset()) -> bool:
        """Wait for the exchange under way, if there is one, and take over what it gave; then write this
        rank's own model in these parameters, where that is due. False where a sum overflowed."""
        under_way = self._under_way
        if under_way is None and not (
            isinstance(self.pipeline, StepPipeline) and self.pipeline.is_due(names)
        ):
            return True
        start = time.perf_counter()
        if under_way is not None:
            self.watch.need()
        done = self.engine.submit_call(lambda: self._settle(under_way, names), self.device)
        try:
            wait([done])
        finally:
            if done.done():
                self._under_way = None
        try:
            done.result()
        except UnmatchedError:
            assert under_way is not None
            if under_way.is_tentative:
                self.forget_exchange()
            else:
                self.start_exchange()
            return self.take_over(names)
        if under_way is None:
            return True
        self.pipeline.stats.timeline.spans.append(Span("waiting", -1, start, time.perf_counter()))
        if self.exchanges_steps:
            self._compare()  # now, and not after an optimizer's step: a rank may skip its own
        return under_way.was_good

    @property
    def has_begun_tentatively(self) -> bool:
        """Whether an exchange is under way of which nobody knows yet whether all ranks take part."""
        return self._under_way is not None and self._under_way.is_tentative

    def forget_exchange(self) -> None:
        """A tentative one, of which nothing was or will be kept."""
        self._under_way = None

    def _settle(self, under_way: UnderWay | None, names: Set[str]) -> None:
        """On the engine's thread, after the programs of the exchange."""
        if under_way is not None and not under_way.is_taken_over:
            self.watch.got()
            for future in under_way.futures:
                future.result()
            if isinstance(self.pipeline, StepPipeline):
                under_way.was_good = self.pipeline.take_over(under_way.tensors, names)
            under_way.is_taken_over = True
            self.watch.done()
        if isinstance(self.pipeline, StepPipeline) and names:
            self.pipeline.fold(self.pipeline.own, names)

    def begin_step(self) -> None:
        self.fitted.note_rate()
        self.pipeline.has_notice = self._has_notice
        if self._scaler is not None and isinstance(self.pipeline, GradientPipeline):
            self.pipeline.loss_scale = self._scaler.get_scale()

    @property
    def _where(self) -> str:
        return f"rank {self.engine.rank}, step {self.pipeline.step}"

    def describe(self, index: int) -> str:
        return f"unit {index} of {len(self.pipeline.units)} in step {self.pipeline.step}"

    def before_update(self, names: Set[str], optimizer: Any) -> None:
        """An optimizer is about to write these parameters.

        A skipped step changes nothing: optimizers pass over parameters without a gradient. Gradients were
        voted on, so that all ranks skip. A step is each rank's own business.
        """
        if self.models is not None:
            self.models.show_own(names)
        self.take_over_if_ripe(names)
        if self.exchanges_steps:
            good = self.are_finite([g for name in names if (g := self.parameters[name].grad) is not None])
            self.pipeline.last_step_good = good
            self.pipeline.skipped += not good
            self._moved |= good
        if not self.pipeline.last_step_good:
            for name in names:
                self.parameters[name].grad = None
        self.fitted.before_update(optimizer, names)

    def are_finite(self, gradients: Sequence[Tensor]) -> bool:
        return kernels.is_finite(*gradients)

    def after_update(self, names: Set[str]) -> None:
        self.fitted.after_update()
        if not self.exchanges_steps:
            self._compare()

    def _compare(self) -> None:
        if self.pipeline.step - self.compared >= VERIFY_EVERY and self._may_compare():
            self.compared = self.pipeline.step
            replicas.compare(self)
            self._advisor.look(self.signs(), self.pipeline.step)

    def _may_compare(self) -> bool:
        return True

    # -- preemption -----------------------------------------------------------------------------------

    def heed_preemption(self, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        """Take these signals, until `close()`, as a notice that this rank will be stopped. They then end
        nothing by themselves: look at `is_preempted` in every step. Call it on the main thread."""
        if self.scheme.silent:
            raise ConfigError("noop exchanges nothing, so that no rank would hear of another's notice")
        self._notice = Notice(signals)

    @property
    def is_preempted(self) -> bool:
        """Whether any rank was given notice: the same answer on all ranks after the same step. Then save, and
        leave with an exit code other than 0, for the launcher to start all ranks again.

        Ranks learn of a notice with the next exchange that begins; with `every` above 1, in the next period.
        """
        return self._is_preempted

    @property
    def _has_notice(self) -> bool:
        return self._notice is not None and self._notice.is_given

    # -- replicas and state ---------------------------------------------------------------------------

    def verify(self) -> None:
        """Raise DivergenceError unless the shared model and replicated state are the same bits on every rank.
        Call it on all of them. It also happens by itself, every 100 steps."""
        if not self.scheme.silent:
            self.take_over()
            self.engine.assemble("verify()", self.pipeline.step)  # no exchange: states may differ
            replicas.compare(self)

    def meet(self, call: str) -> None:
        """Raise on all ranks unless all make this call."""
        what = f"{call.removesuffix('()')} after step {self.pipeline.step}"
        with self.engine.called(call, self.pipeline.step):
            for _ in range(_TRIES):
                try:
                    self.engine.run(self.pipeline.meet(CALLS.index(call)), what, self.device)
                    return
                except UnmatchedError as error:  # with a rank that had only called its model
                    found = str(error)
        raise MismatchError(found)

    @contextmanager
    def shared_model(self) -> Iterator[None]:
        """Within it the parameters hold the model that all ranks share: to evaluate or save it. Needs no
        communication. Behind DistributedDataParallel nobody needs it: parameters hold that model anyway,
        except while a training forward, a backward or a step is running."""
        before = self.models.look() if self.models is not None else frozenset()
        try:
            yield
        finally:
            if self.models is not None:
                self.models.show_own(before)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As it is saved, in tensors of this rank's own."""
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def set_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)

    def share_optimizer_state(self) -> None:
        """Make the optimizers' states the same on all ranks: moments are averaged, the rest is rank 0's. For
        who goes on without a sync; behind DistributedDataParallel it happens by itself. Call it on all ranks.
        """
        self.optimizer_states_to_share()()

    def optimizer_states_to_share(self) -> Callable[[], None]:
        """What does so, later: it needs no sync. Weak: DDP's hook, which may hold it, is held by parameters,
        in a way that the collector cannot see."""
        names = {id(parameter): name for name, parameter in self.held.items()}
        every = self._every_optimizer()
        references, group, device = [weakref.ref(one) for one in every], self._users, self.device

        def share() -> None:
            alive = [one for reference in references if (one := reference()) is not None]
            make_equal(alive, names, group(), device)

        return share

    def _every_optimizer(self) -> Sequence[Any]:
        return self._given if self._optimizers is None else self._optimizers.known(self._given)

    def state_dict(self) -> dict[str, Tensor]:
        """Residual, models and scheme state of this rank, without optimizers: tensors only, for `torch.save`
        and distributed checkpoints. Keys are unique to the rank."""
        return saving.state_of(self)

    def load_state_dict(self, stored: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave, on all ranks or, if it does not fit on one of them, on none. Call
        it on all of them. Saved by another number of ranks, old rank r's is needed on rank r mod P."""
        saving.load(self, "load_state_dict()", lambda: saving.offer_of(self, stored))

    def save(self, folder: str | PathLike[str], optimizers: bool = True) -> None:
        """Write a checkpoint, with the optimizers' states, to a folder that all ranks see, in the place of
        the one there, which is whole until the new one is. Call it on all ranks."""
        files.save(self, Path(folder), optimizers)

    def claim(self, folder: Path) -> Stamp:
        """The stamp of the next checkpoint there; for rank 0."""
        return self._writer.next(folder)

    def load(self, folder: str | PathLike[str], optimizers: bool = True) -> None:
        """Take over what `save` wrote, also with another number of ranks; on all ranks or on none. Call it on
        all of them, after the model's own load_state_dict()."""
        saving.load(self, "load()", lambda: files.newest_offer(self, Path(folder), optimizers))

    def flush(self) -> None:
        """Send all residuals, in one dense exchange, at the end of a training. Call it on all ranks.

        Afterwards all ranks' own models are the shared one. With `exchange="gradients"` the mean of the
        residuals is in `.grad` instead: call optimizer.step().
        """
        if self.scheme.silent:
            return
        self.take_over()
        self.meet("flush()")
        if isinstance(pipeline := self.pipeline, GradientPipeline):
            means = self.engine.run(pipeline.drain(), f"flush after step {pipeline.step}", self.device)
            for name, parameter in self.parameters.items():
                parameter.grad = torch.zeros_like(parameter)
                if name in means:
                    flat_view(parameter.grad).copy_(means[name])
            return
        moved, self._moved = self._moved, True
        self.start_exchange("flush()")
        self._moved = moved
        if not self.take_over(self.parameters.keys()):
            raise GradsieveError(
                f"{self._where}: what waits on all ranks adds up to more than {self.pipeline.units[0].dtype} "
                "holds; nothing was flushed, all of it still waits. The training has diverged: go back to a "
                "checkpoint from before"
            )
        if self.models is not None:
            self.models.raise_versions()
        replicas.compare(self)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_` would clip the mean of all ranks' gradients; before the
        optimizer's step. Returns the norm of that mean.

        A rank's own gradient, all it has where steps are exchanged, is longer by the noise of its own batch:
        what is clipped to 1 in a dense training would be clipped harder here.
        """
        shorter = self.pipeline.rho**0.5 if isinstance(self.pipeline, StepPipeline) else 1.0
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), max_norm / shorter)
        return norm * shorter

    def close(self) -> None:
        """Let go of model and optimizer, with its momentum; end the communication thread and its group. The
        model is then the shared one, without what was not flushed. One that is not closed ends with Python.
        """
        if self.is_closed:
            return
        self.leave()
        under_way = self._under_way
        if self.has_begun_tentatively:
            self.forget_exchange()
        elif under_way is not None and not wait(under_way.futures, timeout=1.0).not_done:
            self.take_over()
        if isinstance(self.pipeline, StepPipeline) and self.models is not None:
            sayings.what_is_left(self.pipeline)
            self.models.end()
        self.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Flushes and closes at the end of a `with` block; where the block raised, closes only: the other
        ranks may not have come this far."""
        try:
            if kind is None and not self.is_closed:
                self.flush()
                if not self.exchanges_steps:
                    for optimizer in self._every_optimizer():
                        optimizer.step()
        finally:
            self.close()

    def abandon(self) -> None:
        """Close where nobody wants the model any more, nor what waits for it."""
        self.leave()
        self.is_closed = True
        if self._notice is not None:
            self._notice.close()
        self.fitted.give_back()
        self.engine.close()
        if self.pipeline.observer is not None:
            self.pipeline.observer.close()

    def signs(self) -> dict[str, float]:
        """How old and how much what waits is, and how good what is sent: see `integrations/advice.py`."""
        return signs(self.pipeline.waiting(), self.pipeline.outcomes)

    def metrics(self) -> dict[str, Any]:
        """The last step in figures: bits, bytes, density, seconds, size and age of the residual, through all
        of which it goes: not for every step of a large model."""
        return metrics(self)
