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

import atexit
import contextlib
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from gradsieve import kernels, ranks_alike, startup
from gradsieve.comm.engine import Engine, place_in
from gradsieve.errors import ConfigError, GradsieveError
from gradsieve.hooks import OptimizerHooks
from gradsieve.metrics import metrics
from gradsieve.models import Models
from gradsieve.optimizers import as_list, refuse_sharded, refuse_unfrozen
from gradsieve.pipeline import UNIT_CAP_MB, Pending, Pipeline, make_pipeline
from gradsieve.pipeline.budget import Budget
from gradsieve.pipeline.exchange_settings import (
    Exchange,
    Gradients,
    Steps,
    choose_exchange,
    choose_scheme,
)
from gradsieve.pipeline.frame import Span
from gradsieve.pipeline.tags import CALLS
from gradsieve.replica import Replica
from gradsieve.schemes.base import Scheme
from gradsieve.sync.moments import make_equal
from gradsieve.sync.preemption import Notice
from gradsieve.units import Unit

VERIFY_EVERY = 100
"""Steps between two comparisons of the replicas' fingerprints: a few bytes and one pass over the model."""
_attached: weakref.WeakSet[GradientSync] = weakref.WeakSet()
_attaching = threading.Lock()
"""Several ranks may be threads of one process."""


class GradientSync:
    """Sparse exchange between the ranks of a group: residuals, the shared model, the scheme's state."""

    replica: Replica
    _optimizers: OptimizerHooks | None = None
    _notice: Notice | None = None

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        optimizer: Any,
        *,
        scheme: str | Scheme[Any] | None = None,
        density: float | None = None,
        bits: float | None = None,
        exchange: Exchange | None = None,
        scaler: torch.amp.GradScaler | None = None,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = UNIT_CAP_MB,
    ) -> None:
        """`parameters` with their names; the ranks of `group`, or all; `bucket_cap_mb` is exchanged together.
        Other settings are those of `attach`."""
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised: call init_process_group() first")
        named = dict(parameters)
        held = {name: p for name, p in named.items() if p.requires_grad}
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        chosen = choose_scheme(scheme, density, bits, exchange)
        settings = choose_exchange(exchange, chosen)
        fixed = None if bits is None or isinstance(settings, Gradients) else Budget(bits)
        optimizers = as_list(optimizer)
        refuse_sharded(optimizers, isinstance(settings, Steps))
        _refuse_taken(held, isinstance(settings, Steps))
        self._scaler = scaler
        self._users = weakref.ref(group or dist.group.WORLD)
        self._pending: Pending | None = None
        self.is_closed = self.is_listening = False
        self._is_preempted = False
        kernels.active()  # numba is loaded here and not in the first step
        with contextlib.ExitStack() as undo:  # where this fails, model and optimizer are as they were
            # What cannot be exchanged is refused before there is a group: whoever closes one to which others
            # are still connecting fails them.
            parts, place = self.parts_of(held), place_in(group)
            given = (parts, optimizers, chosen, settings, *place, bucket_cap_mb)
            pipeline = make_pipeline(*given, self.make_models)
            engine = Engine(group)
            undo.callback(engine.close)
            self.replica = self.make_replica(engine, held, pipeline, fixed)
            undo.callback(self.leave)
            self._agree(scheme is None and density is None and bits is None, exchange is None)
            self.enter()
            startup.report_settings(self.replica)
            if self.exchanges_steps:
                _warn_at_exit(self)
            undo.pop_all()
        with _attaching:
            _attached.add(self)

    def parts_of(self, held: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What is exchanged: all of it, where all ranks of the group hold the same."""
        return held

    def make_replica(
        self, engine: Engine, held: Mapping[str, Tensor], pipeline: Pipeline, fixed: Budget | None
    ) -> Replica:
        return Replica(engine, held, pipeline, fixed)

    def make_models(self, parameters: Mapping[str, Tensor], units: Sequence[Unit]) -> Models:
        return Models(parameters, units)

    def _agree(self, chooses_budget: bool, chooses_period: bool) -> None:
        """With the other ranks, on what is sent and when."""
        replica = self.replica
        if replica.world > 1 and not replica.scheme.no_comm:
            replica.engine.agree_on_secret(replica.device)
            ranks_alike.start_alike(replica)
            replica.engine.assume_links()
            self.pipeline.choose_budget(replica.fixed, chooses_budget, chooses_period)

    def enter(self) -> None:
        """Listen to the optimizers that step the model."""
        self.is_listening = True
        self._optimizers = OptimizerHooks(self.held, self)

    def leave(self) -> None:
        """Listen no more. The parameters hold this rank's own model."""
        self.is_listening = False
        if self._optimizers is not None:
            self._optimizers.remove()
        self.replica.models.show_own()

    @property
    def engine(self) -> Engine:
        return self.replica.engine

    @property
    def pipeline(self) -> Pipeline:
        return self.replica.pipeline

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """By name, what is exchanged."""
        return self.replica.parameters

    @property
    def held(self) -> Mapping[str, Tensor]:
        """By name, what the user and the optimizers have."""
        return self.replica.held

    @property
    def scheme(self) -> Scheme[Any]:
        return self.replica.scheme

    @property
    def exchanges_steps(self) -> bool:
        return self.pipeline.exchanges_steps

    # -- a step ---------------------------------------------------------------------------------------

    def reduce(self) -> bool:
        """Exchange, between backward and the optimizer's step; False where the step is to be skipped.

        What the optimizer moved before is exchanged; with `gradsieve.Gradients`, gradients in `.grad`.
        """
        if self.scheme.no_comm:
            return True
        if self.pipeline.begins_exchange():
            self.start_exchange()
        self.complete_if_due()
        self.refresh()
        self.replica.models.raise_versions()
        return self.pipeline.last_step_good

    def start_exchange(self, call: str = CALLS[0]) -> None:
        """Of all units; what it is given is read. For `flush()`, all of the residual."""
        self.complete()
        refuse_unfrozen(self._frozen, self.replica.where)
        self._time("begun")
        self._pending = pending = self.begin(call)
        for index, unit in enumerate(self.pipeline.units):
            program = self.pipeline.program(pending, index)
            pending.futures.append(self.engine.submit(program, self.describe(index), unit.device))

    def begin(self, call: str = CALLS[0], gradients: Mapping[str, Tensor] | None = None) -> Pending:
        """Begin an exchange, of which nothing was submitted yet."""
        if self._scaler is not None:
            self.pipeline.note_loss_scale(self._scaler.get_scale())
        return self.pipeline.begin(call, self._has_notice, gradients)

    def _time(self, what: str) -> None:
        if self.pipeline.timer is not None:
            self.pipeline.timer.mark(what)

    def complete_if_due(self) -> None:
        """In the step in which all ranks do; before it, nobody waits for the pending exchange."""
        if self.pipeline.is_exchange_due:
            self.complete()
            self._is_preempted = self.pipeline.heard_notice

    def complete(self) -> bool:
        """Wait for the pending exchange, if there is one, and apply what it gave. False where a sum
        overflowed."""
        pending = self._pending
        if pending is None:
            return True
        start = time.perf_counter()
        self._time("needed")
        applied = self.apply_meanwhile()
        try:
            wait([applied])
        finally:
            if applied.done():
                self._pending = None
        was_good = applied.result()
        self.pipeline.stats.timeline.spans.append(Span("waiting", -1, start, time.perf_counter()))
        if self.exchanges_steps:
            self._compare()  # now, and not after an optimizer's step: a rank may skip its own
        return was_good

    def apply_meanwhile(self) -> Future[bool]:
        """Apply the pending exchange as soon as it ends, once, and do not wait. Until it is completed nobody
        may look at the shared model or at residuals."""
        pending = self._pending
        assert pending is not None

        def apply() -> bool:
            for future in pending.futures:
                future.result()
            self._time("got")
            return self.pipeline.complete(pending)

        if pending.applied is None:
            pending.applied = self.engine.call(apply, self.replica.device)
        return pending.applied

    def before_looking(self) -> None:
        """Complete what is being applied."""
        if self._pending is not None and self._pending.applied is not None:
            self.complete()

    def refresh(self, names: Set[str] | None = None) -> None:
        """Write what is due of this rank's own model, in these parameters or in all."""
        names = self.parameters.keys() if names is None else names
        if self.replica.models.is_due(names):
            done = self.engine.call(lambda: self.pipeline.rebase(names), self.replica.device)
            wait([done])
            done.result()

    def describe(self, index: int) -> str:
        return f"unit {index} of {len(self.pipeline.units)} in step {self.pipeline.step}"

    def before_update(self, names: Set[str], optimizer: Any) -> None:
        """An optimizer is about to write these parameters.

        A skipped step changes nothing: optimizers pass over parameters without a gradient. Gradients were
        voted on, so that all ranks skip. A step is each rank's own business.
        """
        self.replica.models.show_own(names)
        self.complete_if_due()
        self.refresh(names)
        if self.exchanges_steps:
            found = [g for name in names if (g := self.parameters[name].grad) is not None]
            self.pipeline.note_step(self.are_finite(found))
        if not self.pipeline.last_step_good:
            for name in names:
                self.parameters[name].grad = None
        self.pipeline.before_update(optimizer, names)

    def are_finite(self, gradients: Sequence[Tensor]) -> bool:
        return kernels.is_finite(*gradients)

    def after_update(self, names: Set[str]) -> None:
        self.pipeline.after_update()
        if not self.exchanges_steps:
            self._compare()

    def _compare(self) -> None:
        if self.pipeline.step - self.replica.compared >= VERIFY_EVERY and self._may_compare():
            self.replica.compared = self.pipeline.step
            ranks_alike.compare(self.replica)

    def _may_compare(self) -> bool:
        return True

    # -- preemption -----------------------------------------------------------------------------------

    def heed_preemption(self, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        """Take these signals, until `close()`, as a notice that this rank will be stopped. They then end
        nothing by themselves: look at `is_preempted` in every step. Call it on the main thread."""
        if self.scheme.no_comm:
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
        if not self.scheme.no_comm:
            self.before_call("verify()")
            self.complete()
            self.engine.meet("verify()", self.pipeline.step)  # no exchange: states may differ
            ranks_alike.compare(self.replica)

    def quiesce(self, call: str | None = None) -> None:
        """Leave no exchange pending that will be completed whatever comes; where all ranks are needed, check
        that all of them make this call."""
        if self.is_closed:
            raise ConfigError(
                f"{self.replica.where}: the sync is closed, and has nothing to save or to load into"
            )
        self.before_call(call or "state_dict()")
        self.complete()
        names = self.writable_at_rest()
        if names:
            self.refresh(names)
        self.pipeline.at_rest(names)
        if call is not None and not self.scheme.no_comm:
            self.handshake(call)

    def before_call(self, call: str) -> None:
        """Refuse it where models are being exchanged."""

    def writable_at_rest(self) -> Set[str]:
        """Parameters in which this rank's own model may be written outside of a step: what is due there is in
        no checkpoint, and a resumed training would not know of it."""
        return frozenset()

    def handshake(self, call: str) -> None:
        """Raise on all ranks unless all make this call."""
        what = f"{call.removesuffix('()')} after step {self.pipeline.step}"
        with self.engine.called(call, self.pipeline.step):
            self.engine.run(self.pipeline.handshake(call), what, self.replica.device)

    @contextmanager
    def shared_model(self) -> Iterator[None]:
        """Within it the parameters hold the model that all ranks share: to evaluate or save it. Needs no
        communication. Behind DistributedDataParallel nobody needs it: parameters hold that model anyway,
        except while a training forward, a backward or a step is running."""
        self.before_looking()
        before = self.replica.models.look()
        try:
            yield
        finally:
            self.replica.models.show_own(before)

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
        references, group, device = [weakref.ref(one) for one in every], self._users, self.replica.device

        def share() -> None:
            alive = [one for reference in references if (one := reference()) is not None]
            make_equal(alive, names, group(), device)

        return share

    def _every_optimizer(self) -> Sequence[Any]:
        given = self.replica.optimizers
        return given if self._optimizers is None else self._optimizers.known(given)

    def state_dict(self) -> dict[str, Tensor]:
        """Residual, models and scheme state of this rank, without optimizers: tensors only, for `torch.save`
        and distributed checkpoints. Keys are unique to the rank."""
        from gradsieve.checkpoint import state  # here: a training that saves nothing loads no checkpoint code

        self.quiesce()
        return state.state_of(self.replica)

    def load_state_dict(self, stored: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` gave, on all ranks or, if it does not fit on one of them, on none. Call it
        on all of them. Saved by another number of ranks, old rank r's is needed on rank r mod P."""
        from gradsieve.checkpoint import state

        self.quiesce("load_state_dict()")
        state.load(self.replica, lambda: state.candidate_of(self.replica, stored))

    def save(self, folder: str | PathLike[str], optimizers: bool = True) -> None:
        """Write a checkpoint, with the optimizers' states, to a folder that all ranks see, in the place of
        the one there, which is whole until the new one is. Call it on all ranks."""
        self.save_pair(folder, optimizers, "")

    def save_pair(self, folder: str | PathLike[str], optimizers: bool, pair: str) -> None:
        """As `save`; with `pair`, what a framework's file says that is written with it, the checkpoint before
        stays until that file is written: `frameworks/sidecar.py`."""
        from gradsieve.checkpoint import files

        self.quiesce("save()")
        files.save(self.replica, Path(folder), optimizers, pair)

    def load(self, folder: str | PathLike[str], optimizers: bool = True) -> None:
        """Load what `save` wrote, also with another number of ranks; on all ranks or on none. Call it on
        all of them, after the model's own load_state_dict()."""
        from gradsieve.checkpoint import files, state

        self.quiesce("load()")
        state.load(self.replica, lambda: files.candidate_of(self.replica, Path(folder), optimizers))

    def flush(self) -> None:
        """Send all residuals, in one dense exchange, at the end of a training. Call it on all ranks.

        Afterwards all ranks' own models are the shared one. With `gradsieve.Gradients` the mean of the
        residuals is in `.grad` instead: call optimizer.step().
        """
        if self.scheme.no_comm:
            return
        self.before_call("flush()")
        self.complete()
        self.handshake("flush()")
        self.start_exchange("flush()")
        if not self.complete():
            raise GradsieveError(
                f"{self.replica.where}: the residuals of all ranks add up to more than "
                f"{self.pipeline.units[0].dtype} holds; nothing was flushed, and all residuals are as they "
                "were. The training has diverged: go back to a checkpoint from before"
            )
        self.refresh()
        self.replica.models.raise_versions()
        ranks_alike.compare(self.replica)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_` would clip the mean of all ranks' gradients; before the
        optimizer's step. Returns the norm of that mean.

        A rank's own gradient, all it has where steps are exchanged, is longer by the noise of its own batch:
        what is clipped to 1 in a dense training would be clipped harder here.
        """
        shorter = self.pipeline.rho**0.5
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), max_norm / shorter)
        return torch.mul(norm, shorter)

    def close(self) -> None:
        """Let go of model and optimizer, with its momentum; end the communication thread and its group. The
        model is then the shared one, without what was not flushed. One that is not closed ends with Python.
        """
        if self.is_closed:
            return
        self.leave()
        pending = self._pending
        if pending is not None and not wait(pending.futures, timeout=1.0).not_done:
            self.complete()
        if self.exchanges_steps and not self.is_preempted:  # else it goes on elsewhere
            startup.warn_of_residual(self.pipeline, "close() was called")
        self.replica.models.end()
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
        """Close where nobody wants the model any more, nor the residual."""
        self.leave()
        self.is_closed = True
        if self._notice is not None:
            self._notice.close()
        self.engine.close()
        if self.pipeline.observer is not None:
            self.pipeline.observer.close()

    def metrics(self) -> dict[str, float]:
        """The last step in figures: bits, bytes, density, seconds, size and age of the residual, through all
        of which it goes: not for every step of a large model."""
        self.before_looking()
        return metrics(self.replica)


def _warn_at_exit(sync: GradientSync) -> None:
    reference = weakref.ref(sync)

    def warn() -> None:
        alive = reference()
        failed = getattr(sys, "last_value", None) is not None
        if alive is None or alive.is_closed or failed or alive.is_preempted or alive.engine.world == 1:
            return  # a training that was preempted goes on elsewhere
        with contextlib.suppress(Exception):  # whatever is gone already: it is only a line
            startup.warn_of_residual(alive.pipeline, "the training ended")

    atexit.register(warn)
    weakref.finalize(sync, atexit.unregister, warn).atexit = False


def _refuse_taken(held: Mapping[str, Tensor], exchanges_steps: bool) -> None:
    """A parameter has one owner: who else would know which model it holds?"""
    mine = {id(parameter): name for name, parameter in held.items()}
    with _attaching:
        others = list(_attached)
    for other in others:
        if not other.is_listening or not (exchanges_steps or other.exchanges_steps):
            continue
        taken = [mine[id(parameter)] for parameter in other.held.values() if id(parameter) in mine]
        if taken:
            raise ConfigError(
                f"{', '.join(taken[:4])} belongs to another model to which a sync is attached: put both "
                "models into one module and wrap that in DistributedDataParallel, or use "
                "exchange=gradsieve.Gradients() for both"
            )
