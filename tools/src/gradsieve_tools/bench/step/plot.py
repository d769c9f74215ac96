"""The picture of several `bench step` runs: step time against link rate, one line a sync.

The thick dashed line is the step without communication, the limit. An unshaped link has no rate: it stands
at the right end, and dotted lines lead there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsieve.errors import ConfigError
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
    from matplotlib.figure import Figure  # the `plot` extra, not needed to measure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    places = _places(runs)
    syncs = list(dict.fromkeys(sync for run in runs for sync in run.step_ms if sync != "noop"))
    limit = [run.step_ms["noop"] for run in runs]
    axes.plot(places, limit, "--", color="black", linewidth=3.5, label="noop: the limit")
    for number, sync in enumerate(sync for sync in syncs if sync != "dense"):
        _draw(axes, runs, places, sync, f"C{number % 10}")
    if "dense" in syncs:
        _draw(axes, runs, places, "dense", "dimgray")
    _label_axes(axes, runs, places)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)


def _places(runs: Sequence[Run]) -> list[float]:
    fastest = max((run.rate for run in runs if run.rate is not None), default=1)
    return [run.rate if run.rate is not None else _BEYOND * fastest for run in runs]


def _draw(axes: Any, runs: Sequence[Run], places: Sequence[float], sync: str, colour: str) -> None:
    """The line of one sync, dotted to the unshaped link."""
    own = [(place, run) for place, run in zip(places, runs, strict=True) if sync in run.step_ms]
    x, y = [place for place, _ in own], [run.step_ms[sync] for _, run in own]
    shaped = sum(run.rate is not None for _, run in own)
    axes.plot(x[:shaped], y[:shaped], "-", color=colour, linewidth=1.8)
    axes.plot(x[max(0, shaped - 1) :], y[max(0, shaped - 1) :], ":", color=colour, linewidth=1.8)
    axes.plot(x, y, "o", color=colour, markersize=5, label=sync)


def _label_axes(axes: Any, runs: Sequence[Run], places: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator

    config = runs[0].config
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(places, [run.label for run in runs])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:,g}")
    axes.set_xlabel("rate of each link")
    axes.set_ylabel("milliseconds a training step")
    delay = f", {config['delay']} one way" if config["delay"] else ""
    axes.set_title(
        f"{config['workload']} of {config['params']:,} parameters, {config['hosts']} hosts{delay}, "
        f"density {config['density']:g}",
        size=10,
    )
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
