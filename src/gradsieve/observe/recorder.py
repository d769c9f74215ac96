"""What `gradsieve.record` writes: one line of JSON a step, for whoever wants to see what a training did.

    recorder = gradsieve.record(sync, "runs/exdyna")     # runs/exdyna.rank0.jsonl, ...
    ...
    optimizer.step()
    recorder.note_loss(loss.item())                      # if wanted: belongs to the step just taken

What a step yields by itself (counts, thresholds, spans) is written in every line. Norms need a pass over the
residual: they are taken every `every` steps, piece by piece, and are exact then. A step's line is written
when the next one is committed: only then are all of its seconds known. It goes to the sinks as well, if some
were given (`observe/sinks/`). How the file outlives restarts and full disks: `record_file.py`.

All of it happens on the thread that exchanges; without a recorder a step looks at one attribute.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.observe.record_file import RecordFile
from gradsieve.observe.records import Header, Line, path_of
from gradsieve.observe.sinks import Sink
from gradsieve.pipeline import GradientPipeline, StepPipeline
from gradsieve.pipeline.budget import Fixed
from gradsieve.schemes import SCHEMES
from gradsieve.schemes.base import Scheme
from gradsieve.types import Outcome, Sparse, Vector, to_host

_log = logging.getLogger("gradsieve")

EVERY = 50
"""Steps between two looks at the residual."""
_PIECE = 1 << 17
"""Elements that are looked at at once: they stay in the processor's cache from one sum to the next."""


def _budget(pipeline: GradientPipeline | StepPipeline) -> str:
    if pipeline.budget is None:
        return ""
    return f"{pipeline.budget.bits:g}" if isinstance(pipeline.budget, Fixed) else "auto"


class Recorder:
    """Watches the pipeline of one rank and writes its file."""

    def __init__(
        self,
        pipeline: GradientPipeline | StepPipeline,
        stem: Path,
        every: int = EVERY,
        sinks: Sequence[Sink] = (),
    ) -> None:
        if every < 1:
            raise ConfigError(f"every must be at least 1 step, not {every}")
        if pipeline.observer is not None:
            raise ConfigError("this sync is recorded already: close() the recorder first")
        self.pipeline, self.every, self.path = pipeline, every, path_of(stem, pipeline.rank)
        self._elements = sum(unit.n for unit in pipeline.units)
        self._line: Line | None = None
        self._name, self._last_step, self._is_closed = stem.name, -1, False
        self._start = time.perf_counter()
        self._sinks: list[Sink] = []
        header = self._header()
        self._file = RecordFile(self.path, header)
        try:
            for sink in sinks:
                sink.begin(header)
                self._sinks.append(sink)
        except BaseException:
            self._end()
            raise
        pipeline.observer = self

    def _header(self) -> Header:
        pipeline = self.pipeline
        return Header(
            name=self._name,
            scheme=spec_of(pipeline.scheme),
            exchange="steps" if pipeline.exchanges_steps else "gradients",
            density=1.0 if pipeline.scheme.lossless else pipeline.scheme.density,
            rank=pipeline.rank,
            world=pipeline.world,
            parameters=pipeline.parameters,
            every=self.every,
            period=pipeline.settings.every,
            budget=_budget(pipeline),
            began=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        )

    def after_step(self) -> None:
        self._write()
        pipeline = self.pipeline
        if pipeline.step <= self._last_step:  # a checkpoint was loaded: as if it were started again
            self._start = time.perf_counter()
            self._file.begin(self._header())
        self._last_step = pipeline.step
        self._stats = stats = pipeline.stats
        line = self._line = Line(
            step=pipeline.step,
            at=time.perf_counter() - self._start,
            density=stats.sent / self._elements if self._elements else 1.0,
            bits=pipeline.bits(),
        )
        outcomes = pipeline.outcomes
        if any(outcome.update.count < outcome.update.numel for outcome in outcomes):  # else none selected
            self._report(line)
        if pipeline.step % self.every == 0:
            look(line, pipeline, outcomes)

    def _report(self, line: Line) -> None:
        reports = [self.pipeline.scheme.report(state) for state in self.pipeline.states]
        line.threshold = _mean(reports, "threshold", [1.0] * len(reports))
        # The ranks of a unit wait for the longest selection in it, so that these add up over units.
        demands = [
            report.get("demand", unit.n) for report, unit in zip(reports, self.pipeline.units, strict=True)
        ]
        line.imbalance = _mean(reports, "imbalance", demands)
        line.cut = _mean(reports, "cut", [1.0] * len(reports))

    def note_loss(self, loss: float) -> None:
        """Of the step just taken: call it after the optimizer's."""
        if self._line is not None:
            self._line.loss = float(loss)

    def note_xi(self, xi: float) -> None:
        """For benches that have all ranks in one process."""
        if self._line is not None:
            self._line.xi = xi

    def _write(self) -> None:
        if self._line is None:
            return
        self._line.seconds = self._stats.seconds
        self._file.write(self._line)
        for sink in list(self._sinks):
            try:
                sink.take(self._line)
            except Exception as error:  # nor is whatever others do with it
                name = type(sink).__name__
                _log.warning("rank %d: %s takes no more lines: %r", self.pipeline.rank, name, error)
                self._sinks.remove(sink)
        self._line = None

    def close(self) -> None:
        """Write the last line. Closing the sync does so too."""
        if self._is_closed:
            return
        self._write()
        self.pipeline.observer = None
        self._end()

    def _end(self) -> None:
        self._is_closed = True
        self._file.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                name = type(sink).__name__
                _log.warning("rank %d: %s was not closed: %r", self.pipeline.rank, name, error)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def spec_of(scheme: Scheme[Any]) -> str:
    """A scheme as text, with those settings that differ from its defaults: `spardl:teams=2`."""
    kind = type(scheme)
    name = next((name for name, each in SCHEMES.items() if each is kind), kind.__name__)
    settings = {each.name: (getattr(scheme, each.name), each.default) for each in fields(scheme)}
    changed = [
        f"{setting}={str(value).lower() if isinstance(value, bool) else value}"
        for setting, (value, default) in settings.items()
        if setting != "density" and value != default
    ]
    return name + (":" + "+".join(changed) if changed else "")


def look(line: Line, pipeline: GradientPipeline | StepPipeline, outcomes: list[Outcome[Any]]) -> None:
    """Norm and age of the residual, and by how much the exchange made it smaller.

    acc = e + spent, so that |acc|^2 = |e|^2 + 2 e.spent + |spent|^2 takes a pass over e, and none over acc.
    """
    sums = torch.zeros(5, dtype=torch.float64, device=pipeline.units[0].device)
    for vector, outcome in zip(_waiting(pipeline), outcomes, strict=False):
        for piece in _pieces(vector):
            sums[:2] += torch.stack([piece.norm(1), piece.dot(piece)])
        for part in outcome.spent.parts():
            values = part.values
            sums[2:] += torch.stack([values.norm(1), values.dot(values), values.dot(_at(vector, part))])
    left, left_energy, gone, gone_energy, both = to_host(sums).tolist()  # the host waits here, once
    acc = left_energy + 2 * both + gone_energy
    line.waiting = math.sqrt(left_energy) / _scale(pipeline)
    line.age = left / gone if gone else None
    line.contraction = left_energy / acc if acc > 0 else None


def _waiting(pipeline: GradientPipeline | StepPipeline) -> Iterator[Tensor | Vector]:
    """The residual of each unit, in memory or not."""
    if isinstance(pipeline, StepPipeline):
        return (local.waiting(pipeline.own) for local in pipeline.local)
    return iter(pipeline.waiting())


def _pieces(vector: Tensor | Vector) -> Iterator[Tensor]:
    n = vector.numel()
    for start in range(0, n, _PIECE):
        stop = min(n, start + _PIECE)
        yield vector[start:stop] if isinstance(vector, Tensor) else vector.between(start, stop)


def _at(vector: Tensor | Vector, part: Sparse) -> Tensor:
    if isinstance(vector, Tensor):
        return vector[part.where]
    if part.indices is None:
        return vector.between(part.start, part.stop)
    return vector.at(part.on_host(), part.indices)


def _scale(pipeline: GradientPipeline | StepPipeline) -> float:
    """What a GradScaler multiplied residuals by."""
    return pipeline.residual_scale if isinstance(pipeline, GradientPipeline) else 1.0


def _mean(reports: list[Any], name: str, weights: list[float]) -> float | None:
    """Over units that have this figure."""
    known = [
        (report[name], weight) for report, weight in zip(reports, weights, strict=True) if name in report
    ]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
