"""`gradsieve.record` writes what every exchange did to a file.

    recorder = gradsieve.record(sync, "runs/exdyna")     # runs/exdyna.rank0.jsonl, ...
    ...
    optimizer.step()
    recorder.note_loss(loss.item())                      # if wanted: belongs to the step just taken

Norms need a pass over the residual, and are taken every `every` exchanges. The line of an exchange is written
with the next one, when all of its seconds are known, on the thread that exchanges.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve.metrics import look
from gradsieve.pipeline import Pipeline
from gradsieve.record_file import MARK, VERSION, RecordFile, path_of
from gradsieve.schemes import SCHEMES
from gradsieve.schemes.base import Scheme
from gradsieve.startup import changed
from gradsieve.sync import GradientSync

EVERY = 50
_LOOKED_FOR = ("threshold", "imbalance", "cut", "waiting", "age", "contraction", "xi", "loss")


def record(sync: GradientSync, path: str | Path, *, every: int = EVERY) -> Recorder:
    """Write one line of JSON an exchange to `path`.rank0.jsonl, and so on for each rank (of shards, to
    `path`.shard0.rank0.jsonl), with norms every `every` exchanges. Call it on the ranks that are to be
    recorded; docs/recording.md describes the fields."""
    sync.runner.complete()
    stem, replica = Path(path), sync.replica
    return Recorder(replica.pipeline, stem.with_name(stem.name + replica.part), every)


class Recorder:
    """Observe the exchanges of one rank and write its file."""

    def __init__(self, pipeline: Pipeline, stem: Path, every: int = EVERY) -> None:
        if every < 1:
            raise ConfigError(f"every must be at least 1 step, not {every}")
        if pipeline.observer is not None:
            raise ConfigError("this sync is recorded already: close() the recorder first")
        self.pipeline, self.every, self.path = pipeline, every, path_of(stem, pipeline.rank)
        self.line: dict[str, Any] = {}  # of the last exchange, not written yet
        self._name, self._last_step, self._stats = stem.name, -1, pipeline.stats
        self._elements = sum(unit.n for unit in pipeline.units)
        self._start = time.perf_counter()
        self._file = RecordFile(self.path, self._header())
        pipeline.observer = self

    def _header(self) -> dict[str, Any]:
        pipeline, budget = self.pipeline, self.pipeline.budget
        fixed = "auto" if pipeline.timer is not None else f"{budget.bits:g}" if budget is not None else ""
        return {
            MARK: VERSION,
            "name": self._name,
            "scheme": spec_of(pipeline.scheme),
            "exchange": "steps" if pipeline.exchanges_steps else "gradients",
            "density": 1.0 if pipeline.scheme.lossless else pipeline.scheme.density,
            "rank": pipeline.rank,
            "world": pipeline.world,
            "parameters": pipeline.elements,
            "every": self.every,
            "period": pipeline.settings.every,
            "budget": "" if budget is None else fixed,
            "began": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        }

    def after_step(self) -> None:
        self._write()
        pipeline = self.pipeline
        if pipeline.step <= self._last_step:  # a checkpoint was loaded: as if it were started again
            self._start = time.perf_counter()
            self._file.begin(self._header())
        self._last_step, self._stats = pipeline.step, pipeline.stats
        self.line = {
            "step": pipeline.step,
            "at": time.perf_counter() - self._start,
            "density": self._stats.sent / self._elements if self._elements else 1.0,
            "bits": pipeline.bits(),
            "seconds": {},
            **dict.fromkeys(_LOOKED_FOR),
        }
        if any(outcome.update.count < outcome.update.numel for outcome in pipeline.outcomes):
            self.line |= self._selections()
        if pipeline.step % self.every == 0:
            found = look(pipeline)
            self.line |= {"waiting": found.norm, "age": found.age, "contraction": found.contraction}

    def _selections(self) -> dict[str, float | None]:
        reports = self.pipeline.reports()
        equal = [1.0] * len(reports)
        # The ranks of a unit wait for the longest selection in it: these add up over units.
        demands = [r.get("demand", unit.n) for r, unit in zip(reports, self.pipeline.selected, strict=True)]
        return {
            "threshold": _mean(reports, "threshold", equal),
            "imbalance": _mean(reports, "imbalance", demands),
            "cut": _mean(reports, "cut", equal),
        }

    def note_loss(self, loss: float) -> None:
        """Add the loss of the step just taken to its line: call it after the optimizer's step."""
        if self.line:
            self.line["loss"] = float(loss)

    def _write(self) -> None:
        if self.line:
            self._file.write(self.line | {"seconds": self._stats.seconds})
            self.line = {}

    def close(self) -> None:
        """Write the last line, as closing the sync does, too."""
        if self.pipeline.observer is self:
            self._write()
            self.pipeline.observer = None
            self._file.close()


def spec_of(scheme: Scheme[Any]) -> str:
    """Return a scheme as text, with the settings that differ from its defaults: `spardl:teams=2`."""
    name, settings = SCHEMES.name_of(type(scheme)), changed(scheme)
    settings.pop("density", None)
    texts = {key: str(v).lower() if isinstance(v, bool) else v for key, v in settings.items()}
    return name + (":" if texts else "") + "+".join(f"{key}={text}" for key, text in texts.items())


def _mean(reports: Sequence[Mapping[str, float]], name: str, weights: Sequence[float]) -> float | None:
    """Return the mean over the units that have this figure."""
    known = [(r[name], weight) for r, weight in zip(reports, weights, strict=True) if name in r]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
