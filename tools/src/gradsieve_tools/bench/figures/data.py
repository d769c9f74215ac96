"""The files that a figure is drawn from: records of trainings, or results of benches."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve_tools.records import Header, Line, Record, read

_SETTLED = 0.2  # part of the steps before times are taken: kernels are compiled then, thresholds are found


@dataclass(frozen=True, slots=True)
class Training:
    """The records of one training, of those ranks that there are."""

    header: Header
    ranks: Sequence[Record]

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Means over ranks, of every step that has this figure. Steps that send everything are left out:
        the flush at the end, and others like it."""
        by_step: dict[int, list[float]] = {}
        for record in self.ranks:
            for line in record.lines:
                value = getattr(line, name)
                if value is not None and not self._sends_all(line):
                    by_step.setdefault(line.step, []).append(value)
        return sorted(by_step), [statistics.fmean(by_step[step]) for step in sorted(by_step)]

    def _sends_all(self, line: Line) -> bool:
        return line.density == 1.0 and self.header.density < 1.0

    def stages(self) -> dict[str, float]:
        """Seconds a step, means over ranks and steps."""
        lines = [line for record in self.ranks for line in _settled(record) if not self._sends_all(line)]
        names = dict.fromkeys(name for line in lines for name in line.seconds)
        return {name: statistics.fmean(line.seconds.get(name, 0.0) for line in lines) for name in names}

    def step_seconds(self) -> float:
        """Return the median time from one step to the next; a bench runs others in between."""
        gaps = [after.at - before.at for record in self.ranks for before, after in pairwise(_settled(record))]
        return statistics.median(gaps) if gaps else 0.0


def _settled(record: Record) -> Sequence[Line]:
    return record.lines[int(_SETTLED * len(record.lines)) :]


def records(paths: Sequence[Path]) -> list[Training]:
    """Files of the same name but for the rank are one training's."""
    found: dict[str, list[Record]] = {}
    for path in paths:
        record = read(path)
        if len(record.lines) < 2:
            raise ConfigError(f"{path} has fewer than two steps: there is nothing to draw")
        found.setdefault(record.header.name, []).append(record)
    return [Training(ranks[0].header, ranks) for ranks in found.values()]


def labels(trainings: Sequence[Training]) -> list[str]:
    """Name each training by its scheme and what distinguishes it from the others."""
    headers = [training.header for training in trainings]
    shown: list[Callable[[Header], str]] = [lambda header: header.scheme]
    for field, text in (("density", "density {:g}"), ("world", "{} ranks"), ("exchange", "{}")):
        own = [header for header in headers if field != "density" or header.density < 1.0]
        if len({getattr(header, field) for header in own}) > 1:
            shown.append(lambda header, field=field, text=text: text.format(getattr(header, field)))  # type: ignore[misc]
    names = [", ".join(part(header) for part in shown) for header in headers]
    return [
        header.name if names.count(name) > 1 else name for name, header in zip(names, headers, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Row:
    sync: str
    world: int
    figures: dict[str, Any]


def rows(paths: Sequence[Path]) -> list[Row]:
    found = []
    for path in paths:
        result = _result(path)
        try:
            hosts = result["config"].get("hosts")
            for row in result["rows"]:
                world = row.get("world", row.get("hosts", hosts))
                found.append(Row(str(row.get("scheme", row.get("sync"))), int(world), row))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"{path} is no result of a bench over ranks: {error!r}") from error
    return found


@dataclass(frozen=True, slots=True)
class Curve:
    sync: str
    metric: str
    seconds: list[float]
    values: list[float]


def curves(paths: Sequence[Path]) -> list[Curve]:
    found = []
    for path in paths:
        result = _result(path)
        try:
            for row in result["rows"]:
                curve = row["runs"][0]["curve"]
                known = [
                    (float(second), float(value))
                    for second, value in zip(curve["seconds"], curve["values"], strict=True)
                    if value is not None
                ]
                seconds, values = [second for second, _ in known], [value for _, value in known]
                found.append(Curve(str(row["sync"]), str(curve["metric"]), seconds, values))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            message = f"{path} is no result of `gradsieve bench time-to-accuracy --json`: {error!r}"
            raise ConfigError(message) from error
    return found


def _result(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no result of a bench: {error}") from error
    if not isinstance(result, dict) or not isinstance(result.get("rows"), list) or not result["rows"]:
        raise ConfigError(f"{path} is no result of a bench: it has no rows")
    return result
