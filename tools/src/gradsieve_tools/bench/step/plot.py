"""Results of several `bench step` runs, of one workload at several link rates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve_tools.bench import plots
from gradsieve_tools.emulation.units import UNSHAPED, parse_rate

# settings in which runs of one picture must agree
_SAME = ("workload", "hosts", "params", "density", "delay")
_BEYOND = 6.0  # place of an unshaped link, over the fastest rate


@dataclass(frozen=True, slots=True)
class Run:
    rate: int | None  # bits a second; None for an unshaped link
    config: dict[str, Any]
    step_ms: dict[str, float]

    @property
    def label(self) -> str:
        return str(self.config["rate"] or UNSHAPED)


def read(paths: Sequence[Path]) -> list[Run]:
    """The runs from the slowest link to the fastest; refused unless they differ in their rates alone."""
    if len(paths) < 2:
        raise ConfigError("a line against link rates needs the results of two rates at least")
    runs = [_run(path) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        wrong = [name for name in _SAME if run.config[name] != runs[0].config[name]]
        if wrong:
            raise ConfigError(f"{path} and {paths[0]} differ in {', '.join(wrong)}: draw them apart")
    if len({run.rate for run in runs}) < len(runs):
        raise ConfigError("two of the files are of the same rate: leave one out")
    return sorted(runs, key=lambda run: float("inf") if run.rate is None else run.rate)


def _run(path: Path) -> Run:
    try:
        result = json.loads(path.read_text())
        config = {name: result["config"][name] for name in (*_SAME, "rate")}
        step_ms = {str(row["sync"]): float(row["step_ms"]) for row in result["rows"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of `gradsieve bench step --json`: {error!r}") from error
    if not isinstance(config["hosts"], int):
        raise ConfigError(f"{path} has several numbers of hosts: draw results of one")
    if "noop" not in step_ms:
        raise ConfigError(f"{path} has no row of noop, the limit")
    return Run(parse_rate(config["rate"]), config, step_ms)


def plot(runs: Sequence[Run], path: Path) -> None:
    config = runs[0].config
    fastest = max((run.rate for run in runs if run.rate is not None), default=1)
    delay = f", {config['delay']} one way" if config["delay"] else ""
    title = f"{config['workload']} of {config['params']:,} parameters, {config['hosts']} hosts{delay}, "
    title += f"density {config['density']:g}; noop is the limit"
    places = [float(run.rate or _BEYOND * fastest) for run in runs]
    plots.steps(
        [(place, run.label, run.step_ms) for place, run in zip(places, runs, strict=True)], title, path
    )
