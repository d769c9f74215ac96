"""The picture of `bench time-to-accuracy`: smoothed values against seconds of training, one line a run.

A dot stands where a run reached its target, a cross where one gave up. The way to where syncs differ is cut
off, so that the last points of accuracy or of loss can be distinguished.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsieve_tools.bench.tasks.training import BETTER
from gradsieve_tools.bench.time_to_accuracy.measure import PATIENCE, SMOOTHED_OVER, Plan, Run, summary

_WORSE, _BETTER = 0.15, 0.025  # parts of a target that are shown around it


def plot(plan: Plan, runs: Sequence[Run], path: Path) -> None:
    from matplotlib.figure import Figure  # the `plot` extra, not needed to measure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    for number, row in enumerate(summary(runs)):
        own = [run for run in runs if run.sync == row["sync"]]
        for run in own:
            _draw(axes, run, f"C{number % 10}", _label(row) if run is own[0] else None)
    sign = BETTER[plan.recipe.metric]
    targets = sorted({run.target for run in runs}, key=lambda target: sign * target)
    worst, best = targets[0] * (1 - sign * _WORSE), targets[-1] * (1 + sign * _BETTER)
    for target in targets:
        name = f"target: dense after {plan.steps} steps" if target == targets[0] else None
        axes.axhline(target, linestyle="--", linewidth=1, color="gray", label=name)
    axes.set_xscale("log")
    axes.set_ylim(*sorted((worst, best)))
    axes.set_xlim(left=0.9 * min(_first_seen(run, worst) for run in runs))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds:g}")
    axes.minorticks_off()
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(f"{plan.sized.measured_by}, mean of {SMOOTHED_OVER} evaluations")
    links = " and ".join(filter(None, [plan.rate or "unshaped", plan.delay]))
    axes.set_title(
        f"{plan.sized.title}, {plan.params:,} parameters: {plan.hosts} hosts, {links}, "
        f"density {plan.density:g}\n"
        f"dot: target reached; cross: given up after {PATIENCE * plan.steps} steps",
        size=10,
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)


def _draw(axes: Any, run: Run, colour: str, label: str | None) -> None:
    seconds, values = _seconds(run), run.curve.smoothed
    axes.plot(seconds, values, color=colour, linewidth=1.5, label=label)
    if run.seconds is None:
        axes.plot(seconds[-1], values[-1], "x", color=colour, markersize=9)
    else:
        axes.plot(run.seconds, values[seconds.index(run.seconds)], "o", color=colour, markersize=7)


def _seconds(run: Run) -> list[float]:
    """Of every smoothed value."""
    return run.curve.seconds[SMOOTHED_OVER - 1 :]


def _first_seen(run: Run, worst: float) -> float:
    place = run.curve.crossing(worst)
    return run.curve.seconds[-1 if place is None else place]


def _label(row: dict[str, Any]) -> str:
    if row["seconds"] is None:
        return f"{row['sync']}: reached it {row['reached']} times"
    faster = "" if row["sync"] == "dense" else f", {row['times_dense']:.3g} times as fast"
    return f"{row['sync']}: {row['seconds']:.3g} s{faster}"
