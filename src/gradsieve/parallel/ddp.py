"""`attach`: sparse exchange behind DistributedDataParallel's communication hook.

Steps are exchanged from forward on: what is sent was moved by the optimizer before. Gradients:
DDP hands over buckets, whose layout it changes after the first iteration; the pipeline's units do not
change. A unit is submitted when all of its gradients have arrived and all units before it were submitted;
a bucket is done when all units with a part in it are.
"""

# No `from __future__ import annotations` here: DDP checks that the hook's annotations are types, not strings.

import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from gradsieve import torch_names
from gradsieve.errors import ConfigError
from gradsieve.parallel.fit import ddp_in
from gradsieve.parallel.hooks import CommHook, install_hook
from gradsieve.parallel.model_sync import ModelSync, Settings
from gradsieve.pipeline import UNIT_CAP_MB, GradientPipeline
from gradsieve.pipeline.exchange_settings import Exchange
from gradsieve.schemes.base import Scheme

if TYPE_CHECKING:
    from gradsieve.parallel.hsdp import HsdpSync


class DdpSync(ModelSync):
    """A GradientSync whose gradients come from DDP's buckets while backward runs."""

    _comm_hook: CommHook | None = None

    def __init__(self, ddp: DistributedDataParallel, optimizer: Any, **settings: Unpack[Settings]) -> None:
        ddp = ddp_in(ddp)
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
        if isinstance(self.pipeline, GradientPipeline):
            self.pipeline.may_have_unused = ddp.find_unused_parameters or ddp.static_graph
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        self._unit_of = {
            slot.name: index for index, unit in enumerate(self.pipeline.units) for slot in unit.slots
        }
        self._arrived: dict[str, Tensor] = {}
        self._next_unit = 0
        self._unit_done: dict[int, torch.futures.Future[int]] = {}

    def enter(self) -> None:
        """Also to the model and to DDP."""
        ddp = self._ddp()
        assert ddp is not None
        self._comm_hook = install_hook(ddp, self)
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
                self.belongs_to_a_backward()
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
            gradients = {slot.name: self._arrived[slot.name] for slot in unit.slots}
            program = self.pipeline.program(index, gradients)
            future = self.engine.submit(program, self.describe(index), unit.device)
            future.add_done_callback(_forward_to(self._unit_done[index]))
            self._next_unit += 1
        self._arrived = {}

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


@overload
def attach(
    model: DistributedDataParallel, optimizer: Any, *, replicate: None = None, **settings: Unpack[Settings]
) -> DdpSync: ...


@overload
def attach(
    model: Any, optimizer: Any, *, replicate: DeviceMesh, **settings: Unpack[Settings]
) -> "HsdpSync": ...


def attach(
    model: Any,
    optimizer: Any,
    *,
    replicate: DeviceMesh | None = None,
    scheme: str | Scheme[Any] | None = None,
    density: float | None = None,
    bits: float | None = None,
    exchange: Exchange | None = None,
    scaler: torch.amp.GradScaler | None = None,
    deterministic: bool = False,
) -> "DdpSync | HsdpSync":
    """Replace DDP's dense all-reduce by an exchange of few bits that forward and backward hide.

    Call it on all ranks, after wrapping the model and before the first backward. Evaluate and save as ever:
    the parameters hold the model that all ranks share, the same bits on each of them, except while a training
    forward of the model, a backward pass or a step of its optimizer is running. At the end of a training call
    `flush()` on all ranks.

    Args:
        model: In `DistributedDataParallel`. With `replicate`, a model that was given to
            `fully_shard(model, mesh=mesh["shard"])`. What `torch.compile` and frameworks put around it is
            taken off.
        optimizer: The one that steps the model, or a list of several.
        replicate: The axis of the mesh over which shards are exchanged; FSDP averages over the other one.
        scheme: A name ("exdyna", "topk", ...) or an object such as `gradsieve.schemes.ExDyna(density=0.01)`.
            Without scheme, density and bits, as many bits are sent as forward and backward hide: all elements
            in round robin, in one bit each. A published scheme ("exdyna-paper", ...) has the rules of its
            paper over the whole model at once; it brings the settings of its exchange along and is never
            exchanged densely.
        density: Share of the elements to send in a step. Alone, it is ExDyna's.
        bits: A fixed budget a parameter and step. With `gradsieve.Gradients()` 8 or more: all gradients are
            sent in every step, in 4 bits there and 4 back.
        exchange: `gradsieve.Steps(...)`: every rank steps its own model, and what the steps moved is
            exchanged; the default. Or `gradsieve.Gradients(...)`: gradients are, before the optimizer sees
            them.
        scaler: The `GradScaler`, needed only where gradients are exchanged: residuals then follow its scale.
        deterministic: Decide nothing by the clock, so that a repeated run ends with the same bits. It fixes
            two things: the budget, at 0.75 bits unless `bits`, a scheme or a density says otherwise; and that
            no bucket is exchanged densely where a dense exchange turns out to be faster than the scheme (a
            fast link, a small model, a high density).

    Returns:
        A `GradientSync`.

    Raises:
        ConfigError: A setting that cannot work, or a model or optimizer that it cannot be attached to.
        MismatchError: Ranks gave different settings.
        DivergenceError: Ranks have different weights.
    """
    settings = Settings(scheme=scheme, density=density, bits=bits, exchange=exchange)
    settings |= {"scaler": scaler, "deterministic": deterministic}
    if replicate is None:
        return DdpSync(model, optimizer, **settings)
    from gradsieve.parallel.hsdp import HsdpSync  # FSDP takes two seconds to import

    return HsdpSync(model, optimizer, replicate, **settings)


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
