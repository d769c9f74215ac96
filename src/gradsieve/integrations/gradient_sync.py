"""`GradientSync`: the pipeline on a process group, for any training loop.

    sync = gradsieve.GradientSync(model.named_parameters(), optimizer, density=0.001)
    loss.backward()
    sync.reduce()
    optimizer.step()

`gradsieve.attach` (`ddp.py`) is the same behind DistributedDataParallel's communication hook.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.comm.c10d import Engine
from gradsieve.comm.ops import AllGather, AllReduce
from gradsieve.errors import ConfigError, DivergenceError, Malformed
from gradsieve.feedback import checkpoint
from gradsieve.feedback.digest import digest
from gradsieve.feedback.units import flat_view, shaped_like
from gradsieve.schemes import make
from gradsieve.schemes.base import Scheme
from gradsieve.sync import UNIT_CAP_MB, Pipeline
from gradsieve.types import Program, replicated_fields

VERIFY_EVERY = 100
"""Steps between two comparisons of the replicas' fingerprints: a few bytes and one pass over the model."""


class GradientSync:
    """Sparse exchange of gradients; residuals and scheme state of this rank."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        optimizer: torch.optim.Optimizer,
        *,
        scheme: str | Scheme[Any] = "exdyna",
        density: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = UNIT_CAP_MB,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised: call init_process_group() first")
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.scheme = make(scheme, density)
        self.engine = Engine(group)
        rank, world = self.engine.rank, self.engine.world
        self.pipeline = Pipeline(self.parameters.items(), self.scheme, rank, world, bucket_cap_mb)
        self._scaler = scaler
        self._compared = 0  # the step after which replicas were last compared
        optimizer.register_step_pre_hook(self._before_optimizer_step)
        optimizer.register_step_post_hook(self._after_optimizer_step)

    # -- a step ---------------------------------------------------------------------------------------

    def reduce(self) -> bool:
        """Exchange the gradients in `.grad`; False where the step was skipped on all ranks."""
        if self.scheme.silent:
            return True
        self.begin_step()
        flat = {name: flat_view(_gradient_of(name, p)) for name, p in self.parameters.items()}
        for index, unit in enumerate(self.pipeline.units):
            program = self.pipeline.program(index, {slot.name: flat[slot.name] for slot in unit.slots})
            self.engine.run(program, self.describe(index), unit.device)
        return self.pipeline.last_step_good

    def begin_step(self) -> None:
        if self._scaler is not None:
            self.pipeline.loss_scale = self._scaler.get_scale()

    def describe(self, index: int) -> str:
        return f"unit {index} of {len(self.pipeline.units)} in step {self.pipeline.step}"

    def _before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A skipped step changes nothing: optimizers pass over parameters without a gradient."""
        if not self.pipeline.last_step_good:
            for parameter in self.parameters.values():
                parameter.grad = None

    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.pipeline.step - self._compared >= VERIFY_EVERY and self._may_compare():
            self._compared = self.pipeline.step
            self.verify()

    def _may_compare(self) -> bool:
        return True

    # -- replicas -------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Raise DivergenceError unless parameters and replicated state are the same bits on every rank."""
        if self.scheme.silent:
            return
        unit = self.pipeline.units[0]
        mine = digest([*self.parameters.values(), *self._replicated()]).to(unit.device)
        everyone = self.engine.run(_ask(AllGather(mine)), "the comparison of replicas", unit.device).flatten()
        values, counts = torch.unique(everyone, return_counts=True)
        if values.numel() == 1:
            return
        odd = (everyone != values[counts.argmax()]).nonzero().flatten().tolist()
        tie = int((counts == counts.max()).sum()) > 1
        who = "there is no majority to tell which" if tie else f"against the majority stand ranks {odd}"
        raise DivergenceError(
            f"rank {self.engine.rank}: replicas differ after step {self.pipeline.step}; {who}. Something "
            "outside the exchange changed parameters or state on some ranks only (rank-dependent code, a "
            "partly loaded checkpoint). Restart all ranks from one checkpoint."
        )

    def _replicated(self) -> list[Tensor]:
        tensors = [torch.tensor([self.pipeline.step])]
        for state in self.pipeline.states:
            fields = checkpoint.fields_to_tensors(state, "")
            tensors.extend(fields[name] for name in replicated_fields(state))
        return tensors

    # -- state ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Residuals and scheme state of this rank, tensors only, keys unique to the rank."""
        pipeline, prefix = self.pipeline, f"rank{self.engine.rank}/"
        out = {
            "format": torch.tensor(checkpoint.FORMAT),
            "world": torch.tensor(pipeline.world),
            "step": torch.tensor(pipeline.step),
            "residual_scale": torch.tensor(pipeline.residual_scale, dtype=torch.float64),
            "scheme": checkpoint.text_to_tensor(type(self.scheme).__name__),
        }
        for residual in pipeline.residuals:
            for name, part in residual.by_name().items():
                out[f"residual/{name}"] = shaped_like(part, self.parameters[name]).clone()
        for index, state in enumerate(pipeline.states):
            out.update(checkpoint.fields_to_tensors(state, f"unit/{index}/"))
        return {prefix + key: value for key, value in out.items()}

    def load_state_dict(self, stored: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` of the same rank gave; all of it is checked before any is used."""
        pipeline, prefix = self.pipeline, f"rank{self.engine.rank}/"
        scheme = checkpoint.text_to_tensor(type(self.scheme).__name__)
        for key, expected in (("format", checkpoint.FORMAT), ("world", pipeline.world)):
            found = int(checkpoint.take(stored, prefix + key, (), torch.int64))
            if found != expected:
                raise Malformed(f"the checkpoint's {key} is {found}, this run's is {expected}")
        saved_by = checkpoint.take(stored, prefix + "scheme", None, torch.uint8)
        if not torch.equal(saved_by, scheme):
            raise Malformed(f"the checkpoint is of scheme {checkpoint.tensor_to_text(saved_by)}")
        step = int(checkpoint.take(stored, prefix + "step", (), torch.int64))
        scale = float(checkpoint.take(stored, prefix + "residual_scale", (), torch.float64))
        residuals = {
            name: checkpoint.take(
                stored, f"{prefix}residual/{name}", tuple(self.parameters[name].shape), part.dtype
            )
            for residual in pipeline.residuals
            for name, part in residual.by_name().items()
        }
        states = [
            checkpoint.fields_from_tensors(
                self.scheme.lay(unit.sizes, pipeline.world),
                stored,
                f"{prefix}unit/{index}/",
            )
            for index, unit in enumerate(pipeline.units)
        ]
        pipeline.step, pipeline.states, pipeline.residual_scale = step, states, scale
        self._compared = step
        for residual in pipeline.residuals:
            for name, part in residual.by_name().items():
                shaped_like(part, self.parameters[name]).copy_(residuals[name])

    def flush(self) -> None:
        """Empty the residuals into `.grad` in one dense exchange; call optimizer.step() to apply them."""
        pipeline = self.pipeline
        totals = [
            self.engine.run(_ask(AllReduce(residual.kept.clone())), "flush", residual.unit.device)
            for residual in pipeline.residuals
        ]
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        for residual, total in zip(pipeline.residuals, totals, strict=True):
            mean = total / (pipeline.world * pipeline.residual_scale)
            for slot in residual.unit.sparse:
                flat_view(_gradient_of(slot.name, self.parameters[slot.name])).copy_(
                    mean[slot.start : slot.stop]
                )
            residual.kept.zero_()
        pipeline.last_step_good = True

    def close(self) -> None:
        """End the communication thread and its process group. A sync that is not closed ends with Python."""
        self.engine.close()

    def metrics(self) -> dict[str, Any]:
        """The last step: density, bytes, seconds per stage, residual norm, threshold, imbalance."""
        pipeline, stats = self.pipeline, self.pipeline.stats
        elements = sum(unit.n for unit in pipeline.units)
        norms = [residual.kept.norm() for residual in pipeline.residuals]
        reports = [self.scheme.report(state) for state in pipeline.states]
        return {
            "step": pipeline.step,
            "skipped": pipeline.skipped,
            "density": stats.sent / elements if elements else 0.0,
            "bytes_sent": int(stats.meter.sent),
            "bytes_received": int(stats.meter.received),
            "collectives": stats.meter.collectives,
            "seconds": dict(stats.seconds),
            "residual_norm": float(torch.stack(norms).norm()) if norms else 0.0,
            **{key: max(report[key] for report in reports) for key in (reports[0] if reports else {})},
        }


def _gradient_of(name: str, parameter: Tensor) -> Tensor:
    """`.grad`, made to lie in memory as the parameter does."""
    gradient = parameter.grad
    if gradient is None:
        parameter.grad = gradient = torch.zeros_like(parameter)
    if gradient.layout != torch.strided:
        raise ConfigError(f"parameter {name!r} has a sparse gradient: use Embedding(sparse=False)")
    if gradient.stride() != parameter.stride():
        parameter.grad = gradient = torch.empty_like(parameter).copy_(gradient)
    return gradient


def _ask(op: Any) -> Program[Tensor]:
    return (yield op)
