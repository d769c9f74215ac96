"""Other systems that a record goes to, line by line, in addition to its file.

    from gradsieve.observe.sinks.prometheus import Prometheus
    recorder = gradsieve.record(sync, "rec/run", sinks=[Prometheus(port=9400)])

A sink is given what holds for all lines, then every line, then the end. `FIGURES` has the names, once
for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gradsieve.errors import ConfigError
from gradsieve.observe.records import Header, Line, read


class Sink(Protocol):
    """Whoever takes a record. All of it is called on the thread that exchanges: a sink should be quick."""

    def begin(self, header: Header) -> None:
        """ConfigError where it cannot work: nothing was trained yet."""
        ...

    def take(self, line: Line) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Figure:
    """A field of a line that is one number, and what others call it."""

    field: str
    metric: str
    """In Prometheus, behind `gradsieve_`, with its unit."""
    dotted: str
    """In OpenTelemetry, behind `gradsieve.`: the unit has a place of its own there."""
    unit: str
    """In UCUM, as OpenTelemetry asks."""
    meaning: str


FIGURES = (
    Figure("step", "step", "training.step", "{step}", "Exchanges committed since the training began"),
    Figure("loss", "loss", "training.loss", "1", "As it was noted"),
    Figure("bits", "bits_per_parameter", "exchange.bits", "bit", "Moved by this rank, a parameter and step"),
    Figure("density", "density_ratio", "selection.density", "1", "Elements in the update over all"),
    Figure("threshold", "threshold", "selection.threshold", "1", "Above which elements are sent"),
    Figure(
        "imbalance",
        "imbalance_ratio",
        "selection.imbalance",
        "1",
        "f(t): the longest selection over the mean",
    ),
    Figure("cut", "cut_ratio", "selection.cut", "1", "Ranks that could not send all they selected"),
    Figure("waiting", "waiting_norm", "waiting.norm", "1", "Norm of this rank's residual"),
    Figure("age", "waiting_age_steps", "waiting.age", "{step}", "Age of what is sent now, in the residual"),
    Figure(
        "contraction",
        "contraction_ratio",
        "waiting.contraction",
        "1",
        "Energy that an exchange leaves behind",
    ),
    Figure("xi", "xi_ratio", "waiting.xi", "1", "Ok-Topk's Assumption 1; of virtual ranks"),
)
"""Gauges: a line without such a figure leaves the last one."""


def known(line: Line) -> Iterator[tuple[Figure, float]]:
    """The figures that a line has."""
    for figure in FIGURES:
        value = getattr(line, figure.field)
        if value is not None:
            yield figure, float(value)


def moved_bytes(header: Header, line: Line) -> float:
    """By this rank in the exchange of this line."""
    return line.bits * header.bytes_a_bit


def replay(path: str | Path, sink: Sink) -> None:
    """Give a sink the record in a file, as if it happened now."""
    record = read(Path(path))
    sink.begin(record.header)
    for line in record.lines:
        sink.take(line)
    sink.close()


def missing(package: str, extra: str) -> ConfigError:
    return ConfigError(f"this sink needs {package}: pip install 'gradsieve[{extra}]'")
