"""The picture of several `bench step` runs: step time against link rate, one line a sync, named at its end.

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
from gradsieve_lab.emulation.units import UNSHAPED, parse_rate

_SAME = ("workload", "hosts", "params", "density", "delay")
"""Settings in which runs of one picture must agree."""
_BEYOND = 6.0
"""Where an unshaped link stands, over the fastest rate."""
_LABEL_POINTS, _AWAY = 13.0, 22.0
"""Height of a name with air, and how far from the end of its line it begins."""
_ROOM_BELOW = 0.75
"""Of the limit: its name stands below it."""


@dataclass(frozen=True, slots=True)
class Run:
    rate: int | None
    """Bits a second; None for an unshaped link."""
    config: dict[str, Any]
    step_ms: dict[str, float]
    """By sync."""

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
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # the `plot` extra, not needed to measure
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = _places(runs)
    syncs = list(dict.fromkeys(sync for run in runs for sync in run.step_ms if sync != "noop"))
    limit = [run.step_ms["noop"] for run in runs]
    axes.plot(places, limit, "--", color="black", linewidth=3.5)
    for number, sync in enumerate(sync for sync in syncs if sync != "dense"):
        _draw(axes, runs, places, sync, f"C{number % 10}")
    if "dense" in syncs:
        _draw(axes, runs, places, "dense", "dimgray")
    _label_axes(axes, runs, places)
    limit_name = axes.annotate(
        "no communication: the limit",
        xy=(places[0], limit[0]),
        xytext=(0, -8),
        textcoords="offset points",
        va="top",
        size=9,
        weight="bold",
    )
    figure.draw_without_rendering()  # names have their heights now
    _keep_apart(axes, [name for name in axes.texts if name is not limit_name])
    figure.savefig(path, dpi=150)


def _places(runs: Sequence[Run]) -> list[float]:
    fastest = max((run.rate for run in runs if run.rate is not None), default=1)
    return [run.rate if run.rate is not None else _BEYOND * fastest for run in runs]


def _draw(axes: Any, runs: Sequence[Run], places: Sequence[float], sync: str, colour: str) -> None:
    """The line of one sync, with its name at the end."""
    own = [(place, run) for place, run in zip(places, runs, strict=True) if sync in run.step_ms]
    x, y = [place for place, _ in own], [run.step_ms[sync] for _, run in own]
    shaped = sum(run.rate is not None for _, run in own)
    axes.plot(x[:shaped], y[:shaped], "-", color=colour, linewidth=1.8)
    axes.plot(x[max(0, shaped - 1) :], y[max(0, shaped - 1) :], ":", color=colour, linewidth=1.8)
    axes.plot(x, y, "o", color=colour, markersize=5)
    axes.annotate(
        sync,
        xy=(x[-1], y[-1]),
        xytext=(_AWAY, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        size=9,
        arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkA": 1, "shrinkB": 3},
    )


def _label_axes(axes: Any, runs: Sequence[Run], places: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator

    config = runs[0].config
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(places, [run.label for run in runs])
    axes.minorticks_off()
    axes.set_ylim(bottom=_ROOM_BELOW * min(run.step_ms["noop"] for run in runs))
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


def _keep_apart(axes: Any, names: Sequence[Any]) -> None:
    """Move names up or down from their line's end until none covers another, in the order of the ends."""
    point = axes.figure.dpi / 72
    upwards = sorted(names, key=lambda name: float(axes.transData.transform(name.xy)[1]))
    ends = [float(axes.transData.transform(name.xy)[1]) / point for name in upwards]
    for name, end, height in zip(upwards, ends, spread(ends, _LABEL_POINTS), strict=True):
        name.set_position((_AWAY, height - end))


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """The nearest heights (in the least squares) in the same order that are at least `gap` apart.

    Names that would touch form a block around the mean of their places; blocks that touch become one.
    """
    blocks: list[tuple[float, int]] = []  # where it starts, how many are in it
    for height in heights:
        blocks.append((height, 1))
        while len(blocks) > 1 and blocks[-2][0] + blocks[-2][1] * gap > blocks[-1][0]:
            (start, count), (after, more) = blocks[-2:]
            # In the place that suits all of them on average.
            middle = (start * count + (after - count * gap) * more) / (count + more)
            blocks[-2:] = [(middle, count + more)]
    return [start + number * gap for start, count in blocks for number in range(count)]
