"""A replica's exchanges, which its engine's thread carries out and applies.

What outlives a step is changed on that thread alone, behind the exchanges it belongs to: Ctrl-C interrupts
the wait for it, never the change."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradsieve import kernels, ranks_alike
from gradsieve.optimizers import refuse_unfrozen
from gradsieve.pipeline import Pending
from gradsieve.pipeline.base import TRAINING
from gradsieve.pipeline.frame import Span
from gradsieve.replica import Replica

if TYPE_CHECKING:
    from gradsieve.preemption import Notice

VERIFY_EVERY = 100  # steps between two comparisons of replicas: a few bytes, and one pass over the model


class Runner:
    def __init__(
        self, replica: Replica, frozen: Mapping[str, Tensor], scaler: torch.amp.GradScaler | None
    ) -> None:
        self.replica, self.engine, self.pipeline = replica, replica.engine, replica.pipeline
        self.models, self.device = replica.models, replica.device
        self.pending: Pending | None = None
        self.is_preempted = False
        self._frozen, self._scaler = frozen, scaler
        self._notice: Notice | None = None

    # -- an exchange ------------------------------------------------------------------------------------

    def prepare(self, call: str = TRAINING, gradients: Mapping[str, Tensor] | None = None) -> Pending:
        """Return an exchange of which nothing was submitted yet. `gradients` is filled while backward
        runs."""
        if self._frozen:
            refuse_unfrozen(self._frozen, self.replica.where)
        if self._scaler is not None:
            self.pipeline.note_loss_scale(self._scaler.get_scale())
        return self.pipeline.begin(call, self.has_notice, gradients)

    def submit(self, pending: Pending, index: int) -> Future[None]:
        """Exchange a unit, behind those before it."""
        unit, units = self.pipeline.units[index], len(self.pipeline.units)
        what = f"unit {index} of {units} in step {self.pipeline.step}"
        return self.engine.submit(self.pipeline.program(pending, index), what, unit.device)

    def begin(self, call: str = TRAINING) -> None:
        """Begin to exchange all units; for flush(), all of the residual."""
        self.complete()
        self._mark("begun")
        self.pending = pending = self.prepare(call)
        pending.futures += [self.submit(pending, index) for index in range(len(self.pipeline.units))]

    def apply_meanwhile(self) -> Future[bool]:
        """Apply the pending exchange as soon as it ends, and do not wait. Until it is completed, nothing may
        read the shared model or residuals."""
        pending = self.pending
        assert pending is not None

        def apply() -> bool:
            for future in pending.futures:
                future.result()
            self._mark("got")
            return self.pipeline.complete(pending)

        if pending.applied is None:
            pending.applied = self.engine.call(apply, self.device)
        return pending.applied

    def complete(self) -> bool:
        """Wait until the pending exchange is applied, if there is one. False if a sum overflowed."""
        if self.pending is None:
            return True
        start = time.perf_counter()
        self._mark("needed")
        applied = self.apply_meanwhile()
        try:
            wait([applied])
        finally:
            if applied.done():
                self.pending = None
        was_good = applied.result()
        self.pipeline.stats.timeline.spans.append(Span("waiting", -1, start, time.perf_counter()))
        if self.pipeline.exchanges_steps:
            self.compare_if_due()  # now, and not after an optimizer's step: a rank may skip its own
        return was_good

    def complete_if_due(self) -> None:
        """Complete the pending exchange in the step in which all ranks do."""
        if self.pipeline.is_exchange_due:
            self.complete()
            self.is_preempted = self.pipeline.heard_notice

    def before_reading(self) -> None:
        """Complete what is being applied: the shared model or residuals are about to be read."""
        if self.pending is not None and self.pending.applied is not None:
            self.complete()

    def refresh(self, names: Set[str] | None = None) -> None:
        """Write what is due of this rank's own model, in these parameters or in all."""
        names = self.pipeline.parameters.keys() if names is None else names
        if self.models.is_due(names):
            done = self.engine.call(lambda: self.pipeline.rebase(names), self.device)
            wait([done])
            done.result()

    def compare_if_due(self) -> None:
        if self.pipeline.step - self.replica.compared >= VERIFY_EVERY:
            self.postpone_comparison()
            ranks_alike.compare(self.replica)

    def postpone_comparison(self) -> None:
        self.replica.compared = self.pipeline.step

    def _mark(self, event: str) -> None:
        if (timing := self.pipeline.timing) is not None:
            timing.mark(event)

    # -- an optimizer's step ----------------------------------------------------------------------------

    def before_update(self, names: Set[str], optimizer: torch.optim.Optimizer) -> None:
        """Prepare an optimizer's step of these parameters.

        A skipped step changes nothing: optimizers pass over parameters without a gradient. If gradients are
        exchanged, all ranks voted on them, and skip together. If steps are, each rank decides alone.
        """
        self.complete_if_due()
        self.refresh(names)
        pipeline = self.pipeline
        if pipeline.exchanges_steps:
            gradients = [pipeline.parameters[name].grad for name in names]
            pipeline.note_step(self.are_finite([each for each in gradients if each is not None]))
        if not pipeline.last_step_good:
            for name in names:
                pipeline.parameters[name].grad = None
        pipeline.before_update(optimizer, names)

    def after_update(self, names: Set[str]) -> None:
        self.pipeline.after_update()
        if not self.pipeline.exchanges_steps:
            self.compare_if_due()

    def are_finite(self, gradients: Sequence[Tensor]) -> bool:
        return kernels.is_finite(*gradients)

    # -- preemption -------------------------------------------------------------------------------------

    def heed(self, signals: Iterable[signal.Signals]) -> None:
        from gradsieve.preemption import Notice

        self._notice = Notice(signals)

    @property
    def has_notice(self) -> bool:
        return self._notice is not None and self._notice.is_given

    def close(self) -> None:
        """End the communication thread and its group, and what listens to signals or records."""
        if self._notice is not None:
            self._notice.close()
        self.engine.close()
        if self.pipeline.observer is not None:
            self.pipeline.observer.close()
