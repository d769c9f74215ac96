"""`GradientSync`: the pipeline on a process group, for any training loop.

    sync = gradsieve.GradientSync(model.named_parameters(), optimizer, density=0.001)
    loss.backward()
    sync.reduce()
    optimizer.step()

`gradsieve.attach` (`ddp.py`) is the same behind DistributedDataParallel's communication hook.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradsieve import kernels
from gradsieve.comm.c10d import Engine
from gradsieve.comm.links import measure_links
from gradsieve.comm.ops import AllGather, AllReduce
from gradsieve.errors import ConfigError, DivergenceError, Malformed
from gradsieve.feedback import checkpoint
from gradsieve.feedback.digest import digest
from gradsieve.feedback.residual import Residual
from gradsieve.feedback.units import flat_view, parts_of, shaped_like
from gradsieve.integrations.advice import Advisor, signs
from gradsieve.presets import Preset, choose
from gradsieve.schemes import make
from gradsieve.schemes.base import Scheme
from gradsieve.sync import UNIT_CAP_MB, GradientPipeline, StepPipeline
from gradsieve.sync.fitted import Fitted
from gradsieve.telemetry import Span
from gradsieve.types import Ctx, Program, replicated_fields

VERIFY_EVERY = 100
"""Steps between two comparisons of the replicas' fingerprints: a few bytes and one pass over the model."""

_log = logging.getLogger("gradsieve")


class GradientSync:
    """Sparse exchange between the ranks of a group; what this rank remembers, and the scheme's state."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        optimizer: torch.optim.Optimizer,
        *,
        scheme: str | Scheme[Any] = "exdyna",
        density: float | None = None,
        preset: Preset = "default",
        scaler: torch.amp.GradScaler | None = None,
        dense_if_faster: bool = True,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = UNIT_CAP_MB,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised: call init_process_group() first")
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.scheme = make(scheme, density)
        self.treatment = choose(preset, self.scheme)
        if self.treatment.exchange == "steps" and type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise ConfigError(
                "a ZeroRedundancyOptimizer steps each parameter on one rank, by that rank's gradient alone: "
                "use preset=gradsieve.Treatment(exchange='gradients')"
            )
        active = kernels.active()  # numba is loaded here and not in the first step
        self.engine = Engine(group)
        rank, world = self.engine.rank, self.engine.world
        self.fitted = Fitted(
            self.parameters, optimizer, self.scheme, self.treatment, rank, world, bucket_cap_mb
        )
        self.pipeline = self.fitted.pipeline
        if dense_if_faster and world > 1 and not self.scheme.lossless and not self.scheme.silent:
            here = self.pipeline.units[0].device
            links = self.engine.run(measure_links(Ctx(rank, world, 0), here), "the links", here)
            self.pipeline.fall_back(links)
        self._scaler = scaler
        self._under_way: tuple[dict[str, Tensor], list[Future[None]]] | None = None
        self._compared = 0  # the step after which replicas were last compared
        adaptive = not isinstance(optimizer, torch.optim.SGD)
        self._advisor = Advisor(self.scheme.density, adaptive, rank)
        self.hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(lambda *_: self.before_optimizer_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_optimizer_step()),
        ]
        if rank == 0:
            _log.info(
                "%s at density %g among %d ranks for %s: %s; kernels: %s",
                type(self.scheme).__name__,
                self.scheme.density,
                world,
                type(optimizer).__name__,
                self.treatment.describe(),
                active,
            )

    # -- a step ---------------------------------------------------------------------------------------

    def reduce(self) -> bool:
        """Exchange, between backward and the optimizer's step; False where the step is to be skipped.

        Steps: what the optimizer moved before is exchanged. Gradients: those in `.grad`.
        """
        if self.scheme.silent:
            return True
        self.begin_step()
        self._start_exchange()
        self._finish_exchange()
        return self.pipeline.last_step_good

    def _start_exchange(self, everything: bool = False) -> None:
        """Of all units; what it is given is read, and written in `_finish_exchange`."""
        self._finish_exchange()
        tensors = self.fitted.tensors()
        futures = []
        for index, unit in enumerate(self.pipeline.units):
            own = {slot.name: tensors[slot.name] for slot in unit.slots}
            program = self.pipeline.program(index, own, everything)
            futures.append(self.engine.submit(program, self.describe(index), unit.device))
        self._under_way = tensors, futures

    def _finish_exchange(self) -> None:
        """Wait for the exchange under way, if there is one, and take over what it gave."""
        if self._under_way is None:
            return
        (tensors, futures), self._under_way = self._under_way, None
        start = time.perf_counter()
        wait(futures)  # all of them: nobody reads what is written now
        for future in futures:
            future.result()
        waited = Span("waiting", -1, start, time.perf_counter())
        self.fitted.finish(tensors)
        self.pipeline.stats.timeline.spans.append(waited)
        if isinstance(self.pipeline, StepPipeline):
            self._compare()  # now, and not after an optimizer's step: a rank may skip its own

    def begin_step(self) -> None:
        self.fitted.note_rate()
        if self._scaler is not None and isinstance(self.pipeline, GradientPipeline):
            self.pipeline.loss_scale = self._scaler.get_scale()

    def describe(self, index: int) -> str:
        return f"unit {index} of {len(self.pipeline.units)} in step {self.pipeline.step}"

    def before_optimizer_step(self) -> None:
        """A skipped step changes nothing: optimizers pass over parameters without a gradient.

        Gradients were voted on, so that all ranks skip. A step is each rank's own business.
        """
        self._finish_exchange()
        if isinstance(self.pipeline, StepPipeline):
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            self.pipeline.last_step_good = kernels.is_finite(*gradients)
            self.pipeline.skipped += not self.pipeline.last_step_good
        if not self.pipeline.last_step_good:
            for parameter in self.parameters.values():
                parameter.grad = None

    def _after_optimizer_step(self) -> None:
        if isinstance(self.pipeline, GradientPipeline):
            self._compare()

    def _compare(self) -> None:
        if self.pipeline.step - self._compared >= VERIFY_EVERY and self._may_compare():
            self._compared = self.pipeline.step
            self.verify()
            self._advisor.look(self.signs(), self.pipeline.step)

    def _may_compare(self) -> bool:
        return True

    # -- replicas -------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Raise DivergenceError unless parameters and replicated state are the same bits on every rank."""
        if self.scheme.silent:
            return
        unit = self.pipeline.units[0]
        mine = digest(self._replicated()).to(unit.device)
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
        if isinstance(self.pipeline, StepPipeline):
            tensors += [part for local in self.pipeline.local for part in (local.shared, local.shared_dense)]
            tensors.append(torch.tensor(list(self.pipeline.figures().values()), dtype=torch.float64))
        else:
            tensors += self.parameters.values()
        for state in self.pipeline.states:
            fields = checkpoint.fields_to_tensors(state, "")
            tensors.extend(fields[name] for name in replicated_fields(state))
        return tensors

    # -- state ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Memories and scheme state of this rank, tensors only, keys unique to the rank."""
        self._finish_exchange()
        pipeline, prefix = self.pipeline, f"rank{self.engine.rank}/"
        out = {
            "format": torch.tensor(checkpoint.FORMAT),
            "world": torch.tensor(pipeline.world),
            "step": torch.tensor(pipeline.step),
            "scheme": checkpoint.text_to_tensor(type(self.scheme).__name__),
        }
        for name, figure in pipeline.figures().items():
            out[f"figure/{name}"] = torch.tensor(figure, dtype=torch.float64)
        for key, part in self._memories().items():
            out[key] = shaped_like(part, self._parameter(key)).clone()
        for index, state in enumerate(pipeline.states):
            out.update(checkpoint.fields_to_tensors(state, f"unit/{index}/"))
        return {prefix + key: value for key, value in out.items()}

    def load_state_dict(self, stored: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` of the same rank gave; all of it is checked before any is used."""
        self._finish_exchange()
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
        figures = {
            name: float(checkpoint.take(stored, f"{prefix}figure/{name}", (), torch.float64))
            for name in pipeline.figures()
        }
        memories = {
            key: checkpoint.take(stored, prefix + key, tuple(self._parameter(key).shape), part.dtype)
            for key, part in self._memories().items()
        }
        states = [
            checkpoint.fields_from_tensors(
                self.scheme.lay(unit.sizes, pipeline.world),
                stored,
                f"{prefix}unit/{index}/",
            )
            for index, unit in enumerate(pipeline.units)
        ]
        pipeline.step, pipeline.states = step, states
        pipeline.set_figures(figures)
        self._compared = step
        for key, part in self._memories().items():
            shaped_like(part, self._parameter(key)).copy_(memories[key])

    def _memories(self) -> dict[str, Tensor]:
        """Flat views by kind/parameter. A rank's own model is one: no other rank can save it."""
        out = dict(self.pipeline.memories())
        if isinstance(self.pipeline, StepPipeline):
            out |= {f"own/{name}": flat_view(p.detach()) for name, p in self.parameters.items()}
        return out

    def _parameter(self, key: str) -> Tensor:
        return self.parameters[key.partition("/")[2]]

    def flush(self) -> None:
        """Send everything that waits, in one dense exchange: at the end, or before a model is saved or
        judged.

        Steps: all ranks have the same model afterwards. Gradients: it is in `.grad`; call optimizer.step().
        """
        if self.scheme.silent:
            return
        if isinstance(self.pipeline, StepPipeline):
            self._start_exchange(everything=True)
            self._finish_exchange()
            return
        pipeline = self.pipeline
        totals = [
            self.engine.run(_ask(AllReduce(residual.kept.clone())), "flush", residual.unit.device)
            for residual in pipeline.residuals
            if isinstance(residual, Residual)  # an estimate has nothing that waits
        ]
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        for residual, total in zip(pipeline.residuals, totals, strict=False):
            mean = total / (pipeline.world * pipeline.residual_scale)
            for name, part in parts_of(mean, residual.unit.sparse).items():
                gradient = self.parameters[name].grad
                assert gradient is not None
                flat_view(gradient).copy_(part)
            residual.kept.zero_()
        pipeline.last_step_good = True

    def close(self) -> None:
        """Let go of model and optimizer, with its momentum; end the communication thread and its group.

        A sync that is not closed ends with Python.
        """
        for hook in self.hooks:
            hook.remove()
        self.fitted.give_back()
        self.engine.close()

    def signs(self) -> dict[str, float]:
        """How old and how much what waits is, and how good what is sent: see `integrations/advice.py`."""
        return signs(self.pipeline.waiting(), self.pipeline.outcomes)

    def metrics(self) -> dict[str, Any]:
        """The last step: density, bytes, seconds per stage, what waits and how long, threshold, imbalance."""
        pipeline, stats = self.pipeline, self.pipeline.stats
        elements = sum(unit.n for unit in pipeline.units)
        norms = [waiting.norm() for waiting in pipeline.waiting()]
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
            **self.signs(),
            **pipeline.figures(),
            **{key: max(report[key] for report in reports) for key in (reports[0] if reports else {})},
        }


def _ask(op: Any) -> Program[Tensor]:
    return (yield op)
