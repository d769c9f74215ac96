"""`GradientSync`: sparse exchange between ranks in any training loop.

    sync = gradsieve.GradientSync(model.named_parameters(), optimizer, density=0.001)
    loss.backward()
    sync.reduce()
    optimizer.step()

`gradsieve.attach` makes one that is called by torch's hooks instead.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from gradsieve import kernels, ranks_alike, startup
from gradsieve.attached import Attached, Handle, Phase
from gradsieve.comm.engine import Engine, place_in
from gradsieve.errors import ConfigError, GradsieveError
from gradsieve.models import Models
from gradsieve.optimizers import as_list, refuse_sharded
from gradsieve.pipeline import UNIT_CAP_MB, make_pipeline
from gradsieve.pipeline.budget import Budget
from gradsieve.pipeline.exchange_settings import (
    Exchange,
    Gradients,
    Steps,
    choose_exchange,
    choose_scheme,
)
from gradsieve.replica import Replica
from gradsieve.runner import Runner
from gradsieve.schemes.base import Scheme

if TYPE_CHECKING:
    from gradsieve.shards import Shards

_attached: weakref.WeakSet[Attached] = weakref.WeakSet()
_WRITES_NOTHING = ("flush()", "verify()")  # before which nothing that is due is written
_attaching = threading.Lock()  # several ranks may be threads of one process


class GradientSync:
    """Sparse exchange between the ranks of a group: residuals, the shared model, the scheme's state."""

    runner_type: ClassVar[type[Runner]] = Runner
    is_elastic: ClassVar[bool] = False  # whether ranks may come and go
    _shards: Shards | None = None  # where ranks hold parts of the model
    # Registers the hooks of a model, and yields what removes them.
    _register: Callable[[Attached], Iterable[Handle]] | None = None

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
        """Exchange `parameters`, given with their names, among the ranks of `group`, or all;
        `bucket_cap_mb` at a time. Other settings are those of `attach`."""
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised: call init_process_group() first")
        named = dict(parameters)
        held = {name: p for name, p in named.items() if p.requires_grad}
        frozen = {name: p for name, p in named.items() if not p.requires_grad}
        chosen = choose_scheme(scheme, density, bits, exchange)
        settings = choose_exchange(exchange, chosen)
        fixed = None if bits is None or isinstance(settings, Gradients) else Budget(bits)
        optimizers = as_list(optimizer)
        refuse_sharded(optimizers, isinstance(settings, Steps))
        _refuse_taken(held, isinstance(settings, Steps))
        self.is_closed = False
        self._users = weakref.ref(group or dist.group.WORLD)
        kernels.active()  # numba is loaded here and not in the first step
        with contextlib.ExitStack() as undo:  # where this fails, model and optimizer are as they were
            # What cannot be exchanged is refused before there is a group: a rank that closes one to which
            # others are still connecting fails them.
            shards = self._shards
            parts, models = (held, Models) if shards is None else (shards.locals, shards.models)
            given = (parts, optimizers, chosen, settings, *place_in(group), bucket_cap_mb)
            self.pipeline = make_pipeline(*given, models)
            self.engine = Engine(group)
            undo.callback(self.engine.close)
            make_replica = Replica if shards is None else shards.replica
            self.replica = make_replica(self.engine, held, self.pipeline, fixed)
            self.replica.is_elastic = self.is_elastic
            self.runner = self.runner_type(self.replica, frozen, scaler)
            self.attached = Attached(self.runner, self._register)
            undo.callback(self.attached.leave)
            if self.engine.world > 1 and not chosen.no_comm:
                self.engine.agree_on_secret(self.replica.device)
                ranks_alike.start_alike(self.replica)
                self.engine.assume_links()
                is_free = scheme is None and density is None and bits is None
                self.pipeline.choose_budget(fixed, is_free, exchange is None)
            self.attached.enter()
            startup.report_settings(self.replica)
            if self.pipeline.exchanges_steps:
                _warn_at_exit(self.attached)
            undo.pop_all()
        with _attaching:
            _attached.add(self.attached)

    # -- a step ---------------------------------------------------------------------------------------

    def reduce(self) -> bool:
        """Exchange, between backward and the optimizer's step; False if the step is to be skipped.

        What the optimizer moved before is exchanged; with `gradsieve.Gradients`, gradients in `.grad`.
        """
        if self.pipeline.scheme.no_comm:
            return True
        if self.pipeline.begins_exchange():
            self.runner.begin()
        self.runner.complete_if_due()
        self.runner.refresh()
        self.replica.models.raise_versions()
        return self.pipeline.last_step_good

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_` would clip the mean of all ranks' gradients; before the
        optimizer's step. Returns the norm of that mean.

        A rank has only its own gradient, which is longer by the noise of its batch. Its limit is longer, too.
        """
        shorter = self.pipeline.rho**0.5
        norm = torch.nn.utils.clip_grad_norm_(self.pipeline.parameters.values(), max_norm / shorter)
        return torch.mul(norm, shorter)

    def metrics(self) -> dict[str, float]:
        """Return figures of the last step: bits, bytes, density, seconds, size and age of the residual. It
        reads all of the residual: do not call it in every step of a large model."""
        from gradsieve.metrics import metrics

        self.runner.before_reading()
        return metrics(self.replica)

    # -- preemption -----------------------------------------------------------------------------------

    def heed_preemption(self, signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        """Take these signals, until `close()`, as a notice that this rank will be stopped. They then end
        nothing by themselves: look at `is_preempted` in every step. Call it on the main thread."""
        if self.pipeline.scheme.no_comm:
            raise ConfigError("noop exchanges nothing, so that no rank would hear of another's notice")
        self.runner.heed(signals)

    @property
    def is_preempted(self) -> bool:
        """Whether any rank was given notice: the same answer on all ranks after the same step. Then save, and
        leave with an exit code other than 0, for the launcher to start all ranks again.

        Ranks learn of a notice with the next exchange that begins; with `every` above 1, in the next period.
        """
        return self.runner.is_preempted

    # -- replicas and state ---------------------------------------------------------------------------

    def prepare(self, call: str, meets: bool = True) -> None:
        """Complete what is pending, before `call`. With `meets`, check that all ranks make this call."""
        if self.is_closed:
            raise ConfigError(
                f"{self.replica.where}: the sync is closed, and has nothing to save or to load into"
            )
        self.attached.recover(call)
        self.runner.complete()
        if call not in _WRITES_NOTHING and self.attached.phase is Phase.RESTING:
            # No graph waits for its backward with x: what is due there is in no checkpoint otherwise.
            names = self.pipeline.parameters.keys()
            self.runner.refresh(names)
            self.pipeline.at_rest(names)
        if meets and not self.pipeline.scheme.no_comm:
            what = f"{call.removesuffix('()')} after step {self.pipeline.step}"
            with self.engine.called(call, self.pipeline.step):
                self.engine.run(self.pipeline.handshake(call), what, self.replica.device)

    def verify(self) -> None:
        """Raise DivergenceError unless the shared model and replicated state are the same bits on every rank.
        Call it on all of them. It also happens by itself, every 100 steps."""
        if not self.pipeline.scheme.no_comm:
            self.prepare("verify()", meets=False)
            self.engine.meet("verify()", self.pipeline.step)  # no exchange: states may differ
            ranks_alike.compare(self.replica)

    @contextmanager
    def shared_model(self) -> Iterator[None]:
        """Within it the parameters hold the model that all ranks share: to evaluate or save it. Needs no
        communication. Behind DistributedDataParallel they hold that model anyway, except while a training
        forward, a backward or a step is running."""
        self.runner.before_reading()
        before = self.replica.models.look()
        try:
            yield
        finally:
            self.replica.models.show_own(before)

    def share_optimizer_state(self) -> None:
        """Make the optimizers' states the same on all ranks, to go on without a sync: moments are averaged,
        the rest is rank 0's. Behind DistributedDataParallel it happens by itself. Call it on all ranks."""
        from gradsieve.moments import make_equal

        hooks = self.attached.optimizer_hooks
        make_equal(hooks.known(), hooks.names, self._users(), self.replica.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Return residual, models and scheme state of this rank, without optimizers: tensors only, for
        `torch.save` and distributed checkpoints. Keys are unique to the rank."""
        from gradsieve.checkpoint import state  # here: a training that saves nothing loads no checkpoint code

        self.prepare("state_dict()", meets=False)
        return state.state_of(self.replica)

    def load_state_dict(self, stored: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` gave, on all ranks or, if it does not fit on one of them, on none. Call it
        on all of them. Saved by another number of ranks, old rank r's is needed on rank r mod P."""
        from gradsieve.checkpoint import state

        self.prepare("load_state_dict()")
        state.load(self.replica, lambda: state.candidate_of(self.replica, stored))

    def save(self, folder: str | PathLike[str], optimizers: bool = True) -> None:
        """Replace the checkpoint in a folder that all ranks see, with the optimizers' states. The one before
        stays until the new one is whole. Call it on all ranks."""
        from gradsieve.checkpoint import files

        self.prepare("save()")
        files.save(self.replica, Path(folder), optimizers)

    def load(self, folder: str | PathLike[str], optimizers: bool = True) -> None:
        """Load what `save` wrote, also with another number of ranks; on all ranks or on none. Call it on
        all of them, after the model's own load_state_dict()."""
        from gradsieve.checkpoint import files, state

        self.prepare("load()")
        state.load(self.replica, lambda: files.candidate_of(self.replica, Path(folder), optimizers))

    # -- the end --------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send all residuals, in one dense exchange, at the end of a training. Call it on all ranks.

        Afterwards all ranks' own models are the shared one. With `gradsieve.Gradients` the mean of the
        residuals is in `.grad` instead: call optimizer.step().
        """
        if self.pipeline.scheme.no_comm:
            return
        self.prepare("flush()")
        self.runner.begin("flush()")
        if not self.runner.complete():
            raise GradsieveError(
                f"{self.replica.where}: the residuals of all ranks add up to more than "
                f"{self.pipeline.units[0].dtype} holds; nothing was flushed, and all residuals are as they "
                "were. The training has diverged: go back to a checkpoint from before"
            )
        self.runner.refresh()
        self.replica.models.raise_versions()
        ranks_alike.compare(self.replica)

    def close(self) -> None:
        """Detach from model and optimizer, and end the communication thread and its group. The parameters
        then hold the shared model, without what was not flushed. It happens by itself when Python ends."""
        if self.is_closed:
            return
        self.attached.leave()
        pending = self.runner.pending
        if pending is not None and not wait(pending.futures, timeout=1.0).not_done:
            self.runner.complete()
        if self.pipeline.exchanges_steps and not self.is_preempted:  # else it goes on elsewhere
            startup.warn_of_residual(self.pipeline, "close() was called")
        self.replica.models.end()
        self.abandon()

    def abandon(self) -> None:
        """Close a sync whose model and residual are not needed any more."""
        self.attached.leave()
        self.is_closed = True
        self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Flush and close at the end of a `with` block. After an error only close: the other ranks may not
        have come this far."""
        try:
            if kind is None and not self.is_closed:
                self.flush()
                if not self.pipeline.exchanges_steps:
                    for optimizer in self.attached.optimizer_hooks.known():
                        optimizer.step()
        finally:
            self.close()


def _warn_at_exit(attached: Attached) -> None:
    reference = weakref.ref(attached)

    def warn() -> None:
        alive = reference()
        failed = getattr(sys, "last_value", None) is not None
        if alive is None or failed or not alive.is_listening:
            return
        runner = alive.runner
        if runner.is_preempted or runner.engine.world == 1:  # a training that was preempted goes on elsewhere
            return
        with contextlib.suppress(Exception):  # whatever is gone already: it is only a line
            startup.warn_of_residual(runner.pipeline, "the training ended")

    atexit.register(warn)
    weakref.finalize(attached, atexit.unregister, warn).atexit = False


def _refuse_taken(held: Mapping[str, Tensor], exchanges_steps: bool) -> None:
    """Refuse parameters that belong to another sync, where either switches models."""
    mine = {id(parameter): name for name, parameter in held.items()}
    with _attaching:
        others = list(_attached)
    for other in others:
        replica = other.runner.replica
        if not other.is_listening or not (exchanges_steps or replica.pipeline.exchanges_steps):
            continue
        taken = [mine[id(parameter)] for parameter in replica.held.values() if id(parameter) in mine]
        if taken and len(taken) == len(mine):
            raise ConfigError(
                f"{', '.join(taken[:4])} have a sync already, from when this model was wrapped before: call "
                "its close() first. If no name leads to that sync any more, make the model anew"
            )
        if taken:
            raise ConfigError(
                f"{', '.join(taken[:4])} belongs to another model to which a sync is attached: put both "
                "models into one module and wrap that in DistributedDataParallel, or use "
                "exchange=gradsieve.Gradients() for both"
            )
