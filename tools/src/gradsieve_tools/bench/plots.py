"""Pictures of benches: lines in panels beside each other, one legend for all.

Every picture says what its lines and markers are; `draw` lays them out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsieve_tools.bench.common.race import PATIENCE, SMOOTHED_OVER, Run

if TYPE_CHECKING:
    from gradsieve_tools.bench.accuracy.measure import Case, Found

Row = Mapping[str, Any]

# matplotlib's but for its gray, which is too near to dense's black
_COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9")
REFERENCES = ("dense", "noop")
_STYLES = ("-", "--", ":", "-.")
_MARKS = "osD^vP"


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    x: str
    y: str
    draw: Callable[[Any], None]  # on matplotlib's axes


def draw(panels: Sequence[Panel], path: Path, title: str = "", across: int = 3) -> None:
    figure(panels, title, across).savefig(path, dpi=150)


def figure(panels: Sequence[Panel], title: str = "", across: int = 3) -> Any:
    """Return panels, `across` in a row, and a legend of all their labels as a figure of matplotlib."""
    from matplotlib.figure import Figure  # the `plot` extra, not needed to measure

    across = min(across, len(panels))
    down = math.ceil(len(panels) / across)
    made = Figure(figsize=(3.5 + 5.0 * across, 1 + 4.5 * down), layout="constrained")
    places = list(made.subplots(down, across, squeeze=False).flat)
    labelled: dict[str, Any] = {}
    for axes, panel in zip(places, panels, strict=False):
        panel.draw(axes)
        axes.set_title(panel.title, size=10)
        axes.set_xlabel(panel.x)
        axes.set_ylabel(panel.y)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        handles, names = axes.get_legend_handles_labels()
        labelled |= dict(zip(names, handles, strict=True))
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    made.suptitle(title, size=11)
    made.legend(labelled.values(), labelled.keys(), loc="outside right upper", fontsize=8)
    return made


def look(name: str, names: Sequence[str]) -> dict[str, Any]:
    """Return a colour and a style of line that no other of the names has; dense and noop are black."""
    if name.split(",")[0] in REFERENCES:
        return {"color": "black", "linewidth": 2.5, "linestyle": "-" if name.startswith("dense") else "--"}
    number = [each for each in names if each.split(",")[0] not in REFERENCES].index(name)
    style = _STYLES[number // len(_COLOURS) % len(_STYLES)]
    return {"color": _COLOURS[number % len(_COLOURS)], "linewidth": 1.6, "linestyle": style}


def _by(key: str, rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


def accuracy(found: Found, path: Path) -> None:
    """Draw the metric against steps, a panel a task: means over seeds, bands from the least to the most."""
    kinds: dict[Case, list[Row]] = {}
    for case, course in found:
        kinds.setdefault(replace(case, seed=0), []).append(course)
    names = [_name(kind) for kind in kinds]

    def panel(task: str) -> Panel:
        own = {kind: courses for kind, courses in kinds.items() if kind.task == task}

        def lines(axes: Any) -> None:
            for kind, courses in own.items():
                by_step: dict[int, list[float]] = {}
                for course in courses:
                    for step, value in zip(course["steps"], course["values"], strict=True):
                        by_step.setdefault(step, []).append(value)
                good = {step: each for step, each in sorted(by_step.items()) if all(map(math.isfinite, each))}
                style = look(_name(kind), names)
                axes.plot(
                    [*good], [statistics.fmean(each) for each in good.values()], label=_name(kind), **style
                )
                bounds = [min(each) for each in good.values()], [max(each) for each in good.values()]
                axes.fill_between([*good], *bounds, color=style["color"], alpha=0.15, linewidth=0)

        return Panel(task, "steps", "test accuracy, or loss on unseen data", lines)

    draw([panel(task) for task in dict.fromkeys(kind.task for kind in kinds)], path)


def _name(kind: Case) -> str:
    parts = [kind.sync, *([f"density {kind.density:g}"] if kind.density < 1.0 else [])]
    parts += [kind.treatment] if kind.treatment != "default" else []
    parts += [f"rate x {kind.rate:g}"] if kind.rate != 1.0 else []
    return ", ".join([*parts, f"{kind.world} ranks"])


def bits(rows: Sequence[Row], bound: Callable[[float], float], path: Path) -> None:
    """Draw what an exchange sends against its bits, a panel a task, next to the bound."""
    found = dict.fromkeys((row["scheme"], row["values"]) for row in rows)
    # All ways of all schemes would be a tangle: of other schemes values as they are.
    families = [each for each in found if each[0] in ("stripes", "exdyna", "topk") or each[1] == "exact"]
    names = [f"{scheme}, {values}" for scheme, values in families]
    least = 0.01  # fewer bits would take most of a logarithmic axis

    def panel(task: str, own: Sequence[Row]) -> Panel:
        def lines(axes: Any) -> None:
            for (scheme, values), name in zip(families, names, strict=True):
                line = [row for row in own if (row["scheme"], row["values"]) == (scheme, values)]
                line = sorted((row for row in line if row["bits"] >= least), key=lambda row: row["density"])
                known = [max(0.0, row["known"]) for row in line]
                axes.plot([row["bits"] for row in line], known, label=name, marker="o", **look(name, names))
            spread = sorted({max(least, row["bits"]) for row in rows})
            axes.plot(spread, list(map(bound, spread)), "k--", label="Gaussian bound")
            axes.set_xscale("log")

        return Panel(task, "bits a parameter, moved by the busiest rank", "share of the energy sent", lines)

    draw([panel(task, own) for task, own in _by("task", rows).items()], path)


def schemes(rows: Sequence[Row], path: Path) -> None:
    """Draw energy captured against words, a panel a model, at the most ranks and the highest density."""
    world, density = max(row["world"] for row in rows), max(row["density"] for row in rows)
    rows = [row for row in rows if (row["world"], row["density"]) == (world, density) and row["words"]]
    names = list(dict.fromkeys(row["scheme"] for row in rows))

    def panel(model: str, own: Sequence[Row]) -> Panel:
        def marks(axes: Any) -> None:
            axes.set_xscale("log")
            for row in own:
                near = 0.8 <= row["of_target"] <= 1.25
                colour = look(row["scheme"], names)["color"]
                mark = _MARKS[names.index(row["scheme"]) // len(_COLOURS) % len(_MARKS)]
                face = colour if near else "white"
                axes.plot(
                    *(row["words"], row["fidelity"], mark),
                    color=colour,
                    markerfacecolor=face,
                    label=row["scheme"],
                )

        return Panel(model, "4-byte words of the busiest rank in a step", "energy captured / best", marks)

    title = f"{world} ranks, density {density:g}; hollow: an update of another size than was asked for"
    draw([panel(model, own) for model, own in _by("model", rows).items()], path, title)


def traffic(rows: Sequence[Row], dense: Callable[[int], float], title: str, path: Path) -> None:
    """Draw words against ranks, a line a scheme, crosses by its formula, next to dense."""
    rows = [row for row in rows if row["words"] > 0]  # noop has no place on a logarithmic axis
    by_scheme = _by("scheme", sorted(rows, key=lambda row: int(row["world"])))
    worlds = sorted({row["world"] for row in rows})

    def lines(axes: Any) -> None:
        for scheme, own in by_scheme.items():
            own_worlds, style = [row["world"] for row in own], look(scheme, [*by_scheme])
            axes.plot(own_worlds, [row["words"] for row in own], label=scheme, marker="o", **style)
            axes.plot(own_worlds, [row["formula_words"] for row in own], "x", color=style["color"])
        axes.plot(
            worlds, list(map(dense, worlds)), color="lightgray", linewidth=5, zorder=0, label="dense, formula"
        )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(worlds, [f"{world:,}" for world in worlds])

    draw([Panel(title, "ranks P", "4-byte words of the busiest rank in a step", lines)], path)


def races(groups: Mapping[str, Sequence[Run]], measured_by: str, path: Path) -> None:
    """Draw the smoothed metric against seconds, a panel a group; a dot at the target, a cross without it."""
    names = list(dict.fromkeys(run.name for runs in groups.values() for run in runs))

    def panel(title: str, runs: Sequence[Run]) -> Panel:
        def lines(axes: Any) -> None:
            for run in runs:
                style, first = look(run.name, names), SMOOTHED_OVER - 1
                seconds, values = run.curve.seconds[first:], run.curve.smoothed
                axes.plot(seconds, values, label=run.name, **style)
                place = run.place
                at, mark = (-1, "x") if place is None else (place - first, "o")
                axes.plot(seconds[at], values[at], mark, color=style["color"], markersize=8)
            targets = {run.target for run in runs}
            for target in targets:
                axes.axhline(target, linestyle="--", linewidth=1, color="gray", label="target: dense's end")
            far = 0.25 * max(map(abs, targets))
            axes.set_ylim(min(targets) - far, max(targets) + far)
            axes.set_xscale("log")

        return Panel(title, "seconds of training", f"{measured_by}, mean of {SMOOTHED_OVER}", lines)

    shown = {title: [run for run in runs if run.curve.smoothed] for title, runs in groups.items()}
    title = f"dot: target reached; cross: given up, after {PATIENCE} budgets of steps at the latest"
    draw([panel(title, runs) for title, runs in shown.items()], path, title)


def steps(runs: Sequence[tuple[float, str, Mapping[str, float]]], title: str, path: Path) -> None:
    """Draw step time against link rate, given as place, label and milliseconds by sync; noop is the limit."""
    names = list(dict.fromkeys(sync for _, _, step_ms in runs for sync in step_ms))

    def lines(axes: Any) -> None:
        for name in names:
            own = [(place, step_ms[name]) for place, _, step_ms in runs if name in step_ms]
            axes.plot(*zip(*own, strict=True), label=name, marker="o", **look(name, names))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks([place for place, _, _ in runs], [label for _, label, _ in runs])

    draw([Panel(title, "rate of each link", "milliseconds a training step", lines)], path)
