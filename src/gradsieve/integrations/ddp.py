"""`attach`: sparse exchange behind DistributedDataParallel's communication hook.

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
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradsieve.errors import ConfigError
from gradsieve.integrations.gradient_sync import GradientSync
from gradsieve.presets import Preset
from gradsieve.schemes.base import Scheme
from gradsieve.sync import UNIT_CAP_MB, GradientPipeline, StepPipeline


class DdpSync(GradientSync):
    """A GradientSync whose gradients come from DDP's buckets while backward runs."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        *,
        scheme: str | Scheme[Any] = "exdyna",
        density: float | None = None,
        preset: Preset = "default",
        scaler: torch.amp.GradScaler | None = None,
        dense_if_faster: bool = True,
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise ConfigError(f"attach() wants a DistributedDataParallel model, not {type(ddp).__name__}")
        for name, module in ddp.module.named_modules():
            if getattr(module, "sparse", False) is True:
                raise ConfigError(f"module {name!r} makes sparse gradients: create it with sparse=False")
        super().__init__(
            ((name, p) for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore),
            optimizer,
            scheme=scheme,
            density=density,
            preset=preset,
            scaler=scaler,
            dense_if_faster=dense_if_faster,
            group=ddp.process_group,
            bucket_cap_mb=UNIT_CAP_MB if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap / 2**20,
        )
        # Weak: DDP's reducer holds the hook's state, and the collector cannot see through its C++ part.
        self._ddp = weakref.ref(ddp)
        if isinstance(self.pipeline, GradientPipeline):
            self.pipeline.may_have_unused = ddp.find_unused_parameters or ddp.static_graph
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        self._unit_of = {
            slot.name: index for index, unit in enumerate(self.pipeline.units) for slot in unit.slots
        }
        self._arrived: dict[str, Tensor] = {}
        self._next_unit = 0
        self._unit_done: dict[int, torch.futures.Future[int]] = {}
        self._begun = False
        """Whether the exchange that belongs to the coming backward is under way."""
        self.hooks.append(ddp.register_forward_pre_hook(lambda module, inputs: self.before_forward(module)))

    def before_forward(self, ddp: torch.nn.Module) -> None:
        """What the optimizer moved is known: exchange it while forward and backward compute.

        A rank that skipped its optimizer's step takes over here what it was sent before that; between forward
        and backward autograd would not allow it.
        """
        if self._exchanges_steps and not self._begun and ddp.training and torch.is_grad_enabled():
            self._refuse_join()
            self._start_exchange()
            self._begun = True

    @property
    def _exchanges_steps(self) -> bool:
        return isinstance(self.pipeline, StepPipeline) and not self.scheme.silent

    def hook(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: queue what can be queued and let backward go on."""
        buffer = bucket.buffer()
        if self.scheme.silent or self._exchanges_steps:
            if self._exchanges_steps and bucket.index() == 0:
                if not self._begun:  # a model in evaluation mode is trained
                    self._start_exchange()
                self._begun = False
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(buffer)  # a rank's own gradient, for its own optimizer
            return done
        if bucket.index() == 0:  # also after a backward that broke off
            self.begin_step()
            self._arrived, self._next_unit = {}, 0
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

    def _refuse_join(self) -> None:
        if not self._may_compare():
            raise ConfigError(
                "join() ends by giving all ranks the model of one, which loses what waits on the others: "
                "use attach(..., preset=gradsieve.Treatment(exchange='gradients'))"
            )

    def _submit_ready(self) -> None:
        units = self.pipeline.units
        while self._next_unit < len(units):
            index, unit = self._next_unit, units[self._next_unit]
            if any(slot.name not in self._arrived for slot in unit.slots):
                return
            gradients = {slot.name: self._arrived[slot.name] for slot in unit.slots}
            program = self.pipeline.program(index, gradients)
            future = self.engine.submit(program, self.describe(index), unit.device)
            future.add_done_callback(_forward_to(self._unit_done[index]))
            self._next_unit += 1
        self._arrived = {}

    def _may_compare(self) -> bool:
        """Inside `join()` a rank without input keeps old parameters and takes no optimizer steps."""
        ddp = self._ddp()
        return ddp is not None and not ddp._join_config.enable

    def _name(self, parameter: Tensor) -> str:
        if parameter not in self._names:
            raise ConfigError(
                "DDP handed over a parameter that the model did not have when attach() was called"
            )
        return self._names[parameter]


def attach(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    scheme: str | Scheme[Any] = "exdyna",
    density: float | None = None,
    preset: Preset = "default",
    scaler: torch.amp.GradScaler | None = None,
    dense_if_faster: bool = True,
) -> DdpSync:
    """Replace DDP's dense all-reduce by the sparse exchange of `scheme`.

    `scheme` is a name ("exdyna", "micro", "topk", ...) or an object such as `gradsieve.ExDyna(density=0.01)`.
    `preset` is "default" (every rank steps its own model, and what the steps moved is exchanged), "paper"
    (the scheme as published) or a `gradsieve.Treatment`. Where gradients are exchanged, hand a `GradScaler`
    over as `scaler`: residuals then follow its scale.

    Where a dense exchange turns out to be faster than the scheme (a fast link, a small model, a high
    density), it is used instead, bucket by bucket. Which steps that are depends on time: runs that must be
    the same bits again want `dense_if_faster=False`.

    Call it once, after wrapping the model and before the first backward, and `flush()` before the model is
    saved or judged: until then every rank's model is a little its own.
    """
    sync = DdpSync(
        ddp,
        optimizer,
        scheme=scheme,
        density=density,
        preset=preset,
        scaler=scaler,
        dense_if_faster=dense_if_faster,
    )
    ddp.register_comm_hook(sync, _hook)
    return sync


def _hook(sync: DdpSync, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return sync.hook(bucket)


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
