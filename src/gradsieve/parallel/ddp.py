"""Sparse exchange behind DistributedDataParallel's communication hook.

Steps are exchanged from forward on: what is sent was moved by the optimizer before. Gradients:
DDP hands over buckets, whose layout it changes after the first iteration; the pipeline's units do not
change. A unit is submitted when all of its gradients have arrived and all units before it were submitted;
a bucket is done when all units with a part in it are.
"""

# No `from __future__ import annotations` here: DDP checks that the hook's annotations are types, not strings.

import weakref
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradsieve import torch_names
from gradsieve.errors import ConfigError
from gradsieve.hooks import CommHook, hook_of, install_comm_hook
from gradsieve.parallel.attached import Attached
from gradsieve.pipeline import UNIT_CAP_MB


class DdpSync(Attached):
    """A GradientSync whose gradients come from DDP's buckets while backward runs."""

    _comm_hook: CommHook | None = None

    def __init__(self, ddp: DistributedDataParallel, optimizer: Any, **settings: Any) -> None:
        # Weak: DDP's reducer holds the hook's state, and the collector cannot see through its C++ part.
        self._ddp = weakref.ref(ddp)
        super().__init__(
            ddp.module,
            ((name, p) for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore),
            optimizer,
            group=ddp.process_group,
            bucket_cap_mb=UNIT_CAP_MB if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap / 2**20,
            **settings,
        )
        if ddp.find_unused_parameters or ddp.static_graph:
            self.pipeline.keep_unused()
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        self._unit_of = {
            slot.name: index for index, unit in enumerate(self.pipeline.units) for slot in unit.slots
        }
        self._next_unit = 0
        self._unit_done: dict[int, torch.futures.Future[int]] = {}

    def enter(self) -> None:
        """Also to the model and to DDP."""
        ddp = self._ddp()
        assert ddp is not None
        self._comm_hook = hook_of(ddp) or install_comm_hook(ddp)
        self._comm_hook.sync = self
        if not self.exchanges_steps:  # all ranks will take the same step
            self._comm_hook.catch_up()
        self._comm_hook.before_averaging = None
        super().enter()

    def leave(self) -> None:
        """DDP averages gradients by itself again."""
        if self._comm_hook is not None:
            self._comm_hook.sync = None
        super().leave()

    def close(self) -> None:
        """As ever. Who goes on with plain DDP goes on with the same moments on all ranks: they are averaged
        when DDP next averages gradients, and not at all if it does not."""
        was_open = not self.is_closed
        super().close()
        if was_open and self._comm_hook is not None and self.exchanges_steps and self.engine.world > 1:
            self._comm_hook.before_averaging = self.optimizer_states_to_share()

    # -- what DDP's hook leads to -----------------------------------------------------------------------

    def hook(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: queue what can be queued and let backward go on."""
        buffer = bucket.buffer()
        if self.scheme.no_comm or self.exchanges_steps:
            if self.exchanges_steps and bucket.index() == 0:
                self.averaged()
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(buffer)  # a rank's own gradient, for its own optimizer
            return done
        if bucket.index() == 0:  # also after a backward that broke off
            self._arrived: dict[str, Tensor] = {}
            self._begun, self._next_unit = self.begin(gradients=self._arrived), 0
            self._unit_done = {index: torch.futures.Future() for index in range(len(self.pipeline.units))}
        start, units = 0, set()
        for parameter in bucket.parameters():
            name = self._name(parameter)
            self._arrived[name] = buffer[start : start + parameter.numel()]
            start += parameter.numel()
            units.add(self._unit_of[name])
        waited = [self._unit_done[index] for index in sorted(units)]
        self._submit_ready()
        return torch.futures.collect_all(waited).then(lambda all_done: _or_raise(all_done, buffer))

    def before_exchange(self) -> None:
        if not self._may_compare():
            raise ConfigError(
                "join() ends by giving all ranks the model of one, which loses the others' residuals: "
                "use attach(..., exchange=gradsieve.Gradients())"
            )

    def _submit_ready(self) -> None:
        units = self.pipeline.units
        while self._next_unit < len(units):
            index, unit = self._next_unit, units[self._next_unit]
            if any(slot.name not in self._arrived for slot in unit.slots):
                return
            program = self.pipeline.program(self._begun, index)
            future = self.engine.submit(program, self.describe(index), unit.device)
            future.add_done_callback(_forward_to(self._unit_done[index]))
            self._next_unit += 1

    def _may_compare(self) -> bool:
        """Inside `join()` a rank without input keeps old parameters and takes no optimizer steps."""
        ddp = self._ddp()
        return ddp is not None and not torch_names.is_joining(ddp)

    def _name(self, parameter: Tensor) -> str:
        if parameter not in self._names:
            raise ConfigError(
                "DDP handed over a parameter that the model did not have when attach() was called"
            )
        return self._names[parameter]


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
