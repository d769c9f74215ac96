"""The picture of `bench accuracy`: the metric against steps, one panel a task, one line a kind of training.

A line is the mean over seeds, its band reaches from the worst seed to the best. The first part of the climb
is cut off, so that the ends can be distinguished.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradsieve_tools.bench.accuracy.measure import Case, Found
from gradsieve_tools.bench.tasks import training as tasks

_SHOWN = 0.8  # part of the steps whose values have to fit into the panel
_STYLES = ("-", "--", ":", "-.")
# matplotlib's but for its gray, which is too near to dense's black
_COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9")


@dataclass(frozen=True, slots=True)
class Line:
    """The trainings that differ in nothing but their seed; what is not finite is left out."""

    kind: Case
    seeds: int
    steps: list[int]
    mean: list[float]
    least: list[float]
    most: list[float]


def plot(found: Found, path: Path) -> None:
    from matplotlib.figure import Figure  # the `plot` extra, not needed to measure

    lines = list(lines_of(found))
    shown = list(dict.fromkeys(line.kind.task for line in lines))
    names = list(dict.fromkeys(_name(line, lines) for line in lines))
    across = len(shown) if len(shown) <= 3 else math.ceil(len(shown) / 2)
    down = math.ceil(len(shown) / across)
    legend_rows = math.ceil(len(names) / across)
    figure = Figure(figsize=(1 + 5 * across, 1 + 4 * down + 0.25 * legend_rows), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    drawn: dict[str, Any] = {}
    for axes, task in zip(panels, shown, strict=False):
        own = [line for line in lines if line.kind.task == task]
        drawn |= {_name(line, lines): _draw(axes, line, _look(_name(line, lines), names)) for line in own}
        _frame(axes, own)
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    figure.suptitle(_title(lines), size=11)
    handles = [drawn[name] for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=across, fontsize=9)
    figure.savefig(path, dpi=150)


def lines_of(found: Found) -> Iterator[Line]:
    """Dense first, which is drawn under all others; then what belongs together."""
    groups: dict[Case, list[dict[str, Any]]] = {}
    for case, course in found:
        groups.setdefault(replace(case, seed=0), []).append(course)
    for kind in sorted(groups, key=_order):
        by_step: dict[int, list[float]] = {}
        for course in groups[kind]:
            for step, value in zip(course["steps"], course["values"], strict=True):
                by_step.setdefault(step, []).append(value)
        good = {step: own for step, own in sorted(by_step.items()) if all(map(math.isfinite, own))}
        values = list(good.values())
        mean, least, most = list(map(statistics.mean, values)), list(map(min, values)), list(map(max, values))
        yield Line(kind, len(groups[kind]), list(good), mean, least, most)


def _order(kind: Case) -> tuple[bool, str, str, float, int, float]:
    return kind.sync != "dense", kind.sync, kind.treatment, -kind.density, kind.world, kind.rate


def _name(line: Line, lines: Sequence[Line]) -> str:
    """What sets a line apart from the others."""
    kind = line.kind
    parts = [kind.sync]
    if kind.density < 1.0:
        parts.append(f"density {kind.density:g}")
    if kind.treatment != "default":
        parts.append(kind.treatment)
    if kind.rate != 1.0:
        parts.append(f"rate x {kind.rate:g}")
    if len({other.kind.world for other in lines}) > 1:
        parts.append(f"{kind.world} ranks")
    return ", ".join(parts)


def _title(lines: Sequence[Line]) -> str:
    worlds = " and ".join(str(world) for world in sorted({line.kind.world for line in lines}))
    seeds = sorted({line.seeds for line in lines})
    data = "mixed shards" if lines[0].kind.mixed else "each rank with its own kinds of data"
    if seeds == [1]:
        return f"{worlds} ranks, {data}, one seed"
    some = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return f"{worlds} ranks, {data}; mean of {some} seeds, bands from the least to the most"


def _look(name: str, names: Sequence[str]) -> dict[str, Any]:
    dense = [each for each in names if _is_dense(each)]
    if name in dense:
        return {"color": "black", "linewidth": 3, "linestyle": _STYLES[dense.index(name) % len(_STYLES)]}
    number = [each for each in names if each not in dense].index(name)
    style = _STYLES[number // len(_COLOURS) % len(_STYLES)]
    return {"color": _COLOURS[number % len(_COLOURS)], "linewidth": 1.5, "linestyle": style}


def _is_dense(name: str) -> bool:
    return name.split(",")[0] == "dense"


def _draw(axes: Any, line: Line, look: dict[str, Any]) -> Any:
    if line.seeds > 1:
        axes.fill_between(line.steps, line.least, line.most, color=look["color"], alpha=0.15, linewidth=0)
    return axes.plot(line.steps, line.mean, **look)[0]


def _frame(axes: Any, own: Sequence[Line]) -> None:
    recipe = tasks.TASKS[own[0].kind.task]
    what = "test accuracy, more" if recipe.metric == "accuracy" else "loss on unseen data, less"
    axes.set_title(f"{recipe.name}: {what} is better", size=10)
    axes.set_ylim(*limits(own))
    axes.set_xlabel("steps")
    axes.grid(alpha=0.3)


def limits(lines: Sequence[Line]) -> tuple[float, float]:
    """Of the values in the last part of the steps, with a little margin."""
    ends = [
        value
        for line in lines
        for step, least, most in zip(line.steps, line.least, line.most, strict=True)
        if step >= (1 - _SHOWN) * line.kind.steps
        for value in (least, most)
    ] or [0.0, 1.0]
    margin = 0.05 * (max(ends) - min(ends)) or 0.01
    return min(ends) - margin, max(ends) + margin
