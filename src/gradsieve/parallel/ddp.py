"""A sync whose exchanges begin with DDP's buckets.

Where gradients are exchanged, DDP hands them over in buckets, whose layout it changes after the first
iteration; the pipeline's units do not change. A unit is submitted when all of its gradients have arrived and
all units before it were submitted; a bucket is done when all units with a part in it are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradsieve import hooks, torch_names
from gradsieve.attached import Attached, Handle
from gradsieve.errors import ConfigError
from gradsieve.pipeline import UNIT_CAP_MB
from gradsieve.pipeline.base import Pending
from gradsieve.runner import Runner
from gradsieve.sync import GradientSync


class DdpSync(GradientSync):
    def __init__(self, ddp: DistributedDataParallel, optimizer: Any, **settings: Any) -> None:
        # Weak: DDP's reducer holds the hook's state, and the collector cannot see through its C++ part.
        self._register = partial(_register, weakref.ref(ddp))
        super().__init__(
            ((name, p) for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore),
            optimizer,
            group=ddp.process_group,
            bucket_cap_mb=UNIT_CAP_MB if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap / 2**20,
            **settings,
        )


def _register(reference: weakref.ref[DistributedDataParallel], attached: Attached) -> Iterator[Handle]:
    ddp, runner = reference(), attached.runner
    assert ddp is not None
    comm_hook = hooks.hook_of(ddp) or hooks.install_comm_hook(ddp)
    if attached.switches:
        yield from hooks.register_hooks(ddp.module, attached, first=False)
        # What plain DDP averages later needs the same moments on all ranks.
        comm_hook.before_averaging = _equal_moments(attached, ddp) if runner.engine.world > 1 else None
        comm_hook.hand_over = hooks.own_gradients(ddp, attached.averaged)
    else:
        comm_hook.catch_up()  # all ranks will take the same step
        is_noop = runner.pipeline.scheme.no_comm
        comm_hook.hand_over = (
            hooks.own_gradients(ddp, lambda: None) if is_noop else Buckets(ddp, runner).hand_over
        )
    yield comm_hook


def _equal_moments(attached: Attached, ddp: DistributedDataParallel) -> Any:
    optimizer_hooks, device = attached.optimizer_hooks, attached.runner.device
    group = weakref.ref(ddp.process_group)

    def share() -> None:
        from gradsieve.moments import make_equal

        make_equal(optimizer_hooks.known(), optimizer_hooks.names, group(), device)

    return share


class Buckets:
    """Gradients from DDP's buckets, exchanged while backward runs."""

    def __init__(self, ddp: DistributedDataParallel, runner: Runner) -> None:
        self._ddp, self._runner, self._pipeline = weakref.ref(ddp), runner, runner.pipeline
        if ddp.find_unused_parameters or ddp.static_graph:
            self._pipeline.keep_unused()
        self._names = {parameter: name for name, parameter in self._pipeline.parameters.items()}
        self._unit_of = {
            slot.name: index for index, unit in enumerate(self._pipeline.units) for slot in unit.slots
        }
        self._arrived: dict[str, Tensor] = {}
        self._pending: Pending | None = None
        self._next_unit = 0
        self._unit_done: dict[int, torch.futures.Future[int]] = {}

    def hand_over(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Queue what can be queued, and let backward go on."""
        buffer = bucket.buffer()
        if bucket.index() == 0:  # also after a backward that broke off
            ddp = self._ddp()
            if ddp is None or torch_names.is_joining(ddp):  # a rank without input keeps old parameters
                self._runner.postpone_comparison()
            self._arrived = {}
            self._pending, self._next_unit = self._runner.prepare(gradients=self._arrived), 0
            self._unit_done = {index: torch.futures.Future() for index in range(len(self._pipeline.units))}
        start, units = 0, set()
        for parameter in bucket.parameters():
            if parameter not in self._names:
                raise ConfigError(
                    "DDP handed over a parameter that the model did not have when attach() was called"
                )
            name = self._names[parameter]
            self._arrived[name] = buffer[start : start + parameter.numel()]
            start += parameter.numel()
            units.add(self._unit_of[name])
        waited = [self._unit_done[index] for index in sorted(units)]
        self._submit_ready()
        return torch.futures.collect_all(waited).then(lambda all_done: _or_raise(all_done, buffer))

    def _submit_ready(self) -> None:
        units = self._pipeline.units
        while self._next_unit < len(units):
            index = self._next_unit
            if any(slot.name not in self._arrived for slot in units[index].slots):
                return
            assert self._pending is not None
            future = self._runner.submit(self._pending, index)
            future.add_done_callback(_forward_to(self._unit_done[index]))
            self._next_unit += 1


def _forward_to(target: torch.futures.Future[int]) -> Any:
    def forward(source: Future[None]) -> None:
        error = source.exception()
        if error is None:
            target.set_result(0)
        else:
            target.set_exception(error)  # type: ignore[arg-type]  # torch wants Exception, not BaseException

    return forward


def _or_raise(all_done: torch.futures.Future[list[torch.futures.Future[int]]], buffer: Tensor) -> Tensor:
    all_done.value()  # raises what any of them raised
    return buffer
