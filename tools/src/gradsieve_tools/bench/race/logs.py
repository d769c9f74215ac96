"""A log for each run of the race, and the table that is made of logs.

    {"entry": "auto", "link": "100mbit", "seed": 0, ...}                            how it was run
    {"step": 20, "seconds": 11.2, "loss": 5.21, "wall": 16.0}                       one line an evaluation
    {"end": "reached"}                                                              or steps, seconds, failed

`seconds` are the entry's own, of training alone; `wall` are the race's, from the start of its processes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.race.rules import LINKS
from gradsieve_tools.bench.time_to_accuracy.measure import Curve

Key = tuple[str, str, int]
COLUMNS = [
    "size",
    "link",
    "entry",
    "seconds",
    "spread",
    "times_dense",
    "steps",
    "reached",
    "step_ms",
]


@dataclass(frozen=True, slots=True)
class Log:
    facts: dict[str, Any]
    curve: Curve
    end: str

    @property
    def group(self) -> tuple[str, str]:
        """Logs that are compared."""
        return self.facts["size"], self.facts["link"]

    @property
    def key(self) -> Key:
        """Of the target that it races for."""
        return self.facts["size"], self.facts["link"], self.seed

    @property
    def name(self) -> str:
        return str(self.facts["entry"])

    @property
    def seed(self) -> int:
        return int(self.facts["seed"])

    @property
    def last(self) -> float:
        """The loss in the end, mean of the last evaluations. Dense's is the target of all others."""
        return self.curve.smoothed[-1]

    def at(self, target: float) -> int | None:
        """The place of the evaluation that reached it."""
        return None if self.end == "failed" else self.curve.crossing(target)


def path_of(folder: Path, size: str, link: str, name: str, seed: int) -> Path:
    return folder / f"{size}-{link}-{name}-{seed}.jsonl"


def read(path: Path) -> Log | None:
    """None if it has no end: its run was interrupted."""
    curve = Curve("loss")
    try:
        first, *lines = map(json.loads, path.read_text().splitlines())
        for line in lines:
            if "end" in line:
                return Log(first, curve, str(line["end"]))
            curve.add(int(line["step"]), float(line["seconds"]), float(line["loss"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no log of `gradsieve bench race`: {error!r}") from error
    return None


def read_all(folder: Path) -> list[Log]:
    """In the order of the links in the rules, others after them."""
    found = [log for log in map(read, sorted(folder.glob("*.jsonl"))) if log is not None]
    known = [*LINKS, *(log.facts["link"] for log in found)]
    found.sort(key=lambda log: (log.facts["size"], known.index(log.facts["link"])))
    if not found:
        raise ConfigError(f"{folder} has no logs: gradsieve bench race --logs {folder} makes them")
    return found


def targets(logs: Iterable[Log]) -> dict[Key, float]:
    """Of each size, link and seed."""
    dense = (log for log in logs if log.name == "dense" and log.end != "failed")
    return {log.key: log.last for log in dense}


def table(logs: Sequence[Log]) -> list[dict[str, Any]]:
    """A row for each entry of each group; dense's first."""
    wanted = targets(logs)
    rows = []
    for group in dict.fromkeys(log.group for log in logs):
        own = [log for log in logs if log.group == group and log.key in wanted]
        names = sorted({log.name for log in own}, key=lambda name: (name != "dense", name))
        dense = {log.seed: _seconds(log, wanted) for log in own if log.name == "dense"}
        made = [_row([log for log in own if log.name == name], wanted, dense) for name in names]
        rows += [made[0], *sorted(made[1:], key=lambda row: (row["times_dense"] is None, row["mean"] or 0.0))]
    return rows


def _row(logs: Sequence[Log], wanted: dict[Key, float], dense: dict[int, float | None]) -> dict[str, Any]:
    seconds = [_seconds(log, wanted) for log in logs]
    known = [each for each in seconds if each is not None]
    is_whole = len(known) == len(logs)
    mean = statistics.fmean(known) if is_whole else None
    ratios = [(dense[log.seed] or 0.0) / each for log, each in zip(logs, seconds, strict=True) if each]
    places = [log.at(wanted[log.key]) for log in logs]
    steps = [log.curve.steps[place] for log, place in zip(logs, places, strict=True) if place is not None]
    ran = [log for log in logs if log.curve.steps]
    return {
        "size": logs[0].facts["size"],
        "link": logs[0].facts["link"],
        "entry": logs[0].name,
        "mean": mean,
        "seconds": f"{mean:.1f}" if mean is not None else _missed(logs, wanted),
        "spread": statistics.stdev(known) if is_whole and len(known) > 1 else None,
        "times_dense": statistics.fmean(ratios) if is_whole else None,
        "steps": round(statistics.fmean(steps)) if is_whole else None,
        "reached": f"{len(known)} of {len(logs)}",
        "step_ms": 1e3 * statistics.fmean(log.curve.seconds[-1] / log.curve.steps[-1] for log in ran)
        if ran
        else None,
    }


def _seconds(log: Log, wanted: dict[Key, float]) -> float | None:
    place = log.at(wanted[log.key])
    return None if place is None else log.curve.seconds[place]


def _missed(logs: Sequence[Log], wanted: dict[Key, float]) -> str:
    """In words: of the runs that did not get there, the first."""
    missed = next(log for log in logs if _seconds(log, wanted) is None)
    if missed.end == "failed":
        return "failed"
    if missed.end == "seconds":
        return f"not within {missed.facts['limit']:g} s"
    return f"not within {missed.curve.steps[-1]} steps"
