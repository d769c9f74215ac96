"""A log for each run of the race, and the table that is made of logs.

    {"entry": "auto", "link": "100mbit", "seed": 0, ...}                            how it was run
    {"step": 20, "seconds": 11.2, "loss": 5.21, "wall": 16.0}                       one line an evaluation
    {"end": "reached"}                                                              or steps, seconds, failed

`seconds` are the entry's own, of training alone; `wall` are the race's, from the start of its processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.common.race import Curve, Run, row_of
from gradsieve_tools.bench.race.rules import LINKS

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

    def run(self, targets: Mapping[Key, float]) -> Run:
        return Run(self.name, self.seed, targets[self.key], self.curve, failed=self.end == "failed")


def path_of(folder: Path, size: str, link: str, name: str, seed: int) -> Path:
    return folder / f"{size}-{link}-{name}-{seed}.jsonl"


def read(path: Path) -> Log | None:
    """Return None if it has no end: its run was interrupted."""
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
    found = [log for log in map(read, sorted(folder.glob("*.jsonl"))) if log is not None]
    known = [*LINKS, *(log.facts["link"] for log in found)]
    found.sort(key=lambda log: (log.facts["size"], known.index(log.facts["link"])))
    if not found:
        raise ConfigError(f"{folder} has no logs: gradsieve bench race --logs {folder} makes them")
    return found


def targets(logs: Iterable[Log]) -> dict[Key, float]:
    dense = (log for log in logs if log.name == "dense" and log.end != "failed")
    return {log.key: log.last for log in dense}


def table(logs: Sequence[Log]) -> list[dict[str, Any]]:
    """Return a row for each entry of each group; dense's first."""
    wanted = targets(logs)
    rows = []
    for group in dict.fromkeys(log.group for log in logs):
        own = [log for log in logs if log.group == group and log.key in wanted]
        by_name = {
            name: [log for log in own if log.name == name] for name in sorted({log.name for log in own})
        }
        dense = [log.run(wanted) for log in by_name.pop("dense", [])]
        rows += [_row(*group, [log for log in own if log.name == "dense"], dense, wanted)] if dense else []
        others = [_row(*group, each, dense, wanted) for each in by_name.values()]
        rows += sorted(others, key=lambda row: (row["times_dense"] is None, -(row["times_dense"] or 0.0)))
    return rows


def _row(
    size: str, link: str, logs: Sequence[Log], dense: Sequence[Run], wanted: Mapping[Key, float]
) -> dict[str, Any]:
    runs = [log.run(wanted) for log in logs]
    row = row_of(runs, dense)
    missed = next((log for log, run in zip(logs, runs, strict=True) if run.seconds is None), None)
    seconds = f"{row['seconds']:.1f}" if missed is None else _missed(missed)
    row |= {"size": size, "link": link, "entry": logs[0].name, "mean": row["seconds"], "seconds": seconds}
    return row | {"spread": row["spread_seconds"], "steps": None if missed else round(row["steps"])}


def _missed(log: Log) -> str:
    if log.end == "failed":
        return "failed"
    return (
        f"not within {log.facts['limit']:g} s"
        if log.end == "seconds"
        else f"not within {log.curve.steps[-1]} steps"
    )
