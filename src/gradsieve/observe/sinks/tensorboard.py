"""To TensorBoard: scalars by step, a run a rank, and a page of charts that belong together.

    sinks=[TensorBoard("tb")]            # tensorboard --logdir tb, and there the tab Custom Scalars

It takes every tenth line: a scalar costs tens of microseconds on the thread that exchanges, and a chart has
no more pixels. Norms are taken every 50 steps, so that they are among them.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve.observe.records import Header, Line
from gradsieve.observe.sinks import known, missing, moved_bytes

EVERY = 10

TAGS = {
    "loss": "training/loss",
    "bits": "exchange/bits a parameter",
    "density": "selection/density",
    "threshold": "selection/threshold",
    "imbalance": "selection/imbalance f(t)",
    "cut": "selection/share of ranks cut",
    "waiting": "waiting/norm",
    "age": "waiting/age in steps",
    "contraction": "waiting/contraction",
    "xi": "waiting/xi",
}
"""A folder of charts for each question; the step is the axis."""
_BYTES = "exchange/bytes"
_STEP = "seconds/whole step"
_STAGE = "seconds/stage {}"

LAYOUT: dict[str, dict[str, list[Any]]] = {
    "Does it train?": {
        "loss": ["Multiline", [r"^training/loss$"]],
        "age of the residual, steps": ["Multiline", [r"^waiting/age in steps$"]],
    },
    "Where does a step's time go?": {
        "whole step, s": ["Multiline", [r"^seconds/whole step$"]],
        "training waits for the exchange, s": ["Multiline", [r"^seconds/stage waiting$"]],
        "in collectives, s: the others wait for the lowest": ["Multiline", [r"^seconds/stage exchange$"]],
        "selection, s": ["Multiline", [r"^seconds/stage select$"]],
    },
    "What is sent?": {
        "bits a parameter and step": ["Multiline", [r"^exchange/bits a parameter$"]],
        "density": ["Multiline", [r"^selection/density$"]],
        "imbalance f(t), 1 is balanced": ["Multiline", [r"^selection/imbalance f\(t\)$"]],
        "norm of the residual": ["Multiline", [r"^waiting/norm$"]],
    },
}
"""Of Custom Scalars; tags are regular expressions there. One tag a chart: colours are for ranks."""


class TensorBoard:
    def __init__(self, folder: str | Path, every: int = EVERY) -> None:
        if every < 1:
            raise ConfigError(f"every must be at least 1 line, not {every}")
        if importlib.util.find_spec("tensorboard") is None:
            raise missing("tensorboard", "tensorboard")
        self.folder, self.every = Path(folder), every

    def begin(self, header: Header) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._header, self._began, self._taken = header, time.time(), 0
        self._before: Line | None = None
        run = self.folder / header.name / f"rank{header.rank}"
        try:
            self._writer = SummaryWriter(str(run))
        except OSError as error:
            raise ConfigError(f"TensorBoard's files cannot be written: {error}") from error
        self._writer.add_custom_scalars(LAYOUT)
        about = "\n".join(f"- {name}: `{getattr(header, name)}`" for name in Header.__dataclass_fields__)
        self._writer.add_text("record", about)

    def take(self, line: Line) -> None:
        before, self._before = self._before, line
        self._taken += 1
        if self._taken % self.every and line.age is None:
            return
        scalars = {TAGS[figure.field]: value for figure, value in known(line) if figure.field in TAGS}
        scalars[_BYTES] = moved_bytes(self._header, line)
        if before is not None:
            scalars[_STEP] = (line.at - before.at) / (line.step - before.step) / self._header.period
        for stage, seconds in line.seconds.items():
            scalars[_STAGE.format(stage)] = seconds
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, line.step, self._began + line.at)

    def close(self) -> None:
        self._writer.close()
