"""The picture of a race: loss against seconds of training, a panel for each link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.race.logs import Log, targets
from gradsieve_tools.bench.time_to_accuracy.measure import SMOOTHED_OVER

_WORSE, _BETTER = 0.5, 0.04  # parts of the lowest target that are shown around it, if curves come from so far


def plot(logs: Sequence[Log], path: Path) -> None:
    """The first seed of each entry; a dot where it reached the target, a cross where it ended without."""
    from matplotlib.figure import Figure  # the `plot` extra, not needed to race

    wanted = targets(logs)
    first = [log for log in logs if log.seed == 0 and log.key in wanted and log.curve.smoothed]
    groups = list(dict.fromkeys(log.group for log in first))
    if not groups:
        raise ConfigError("no log of seed 0 has its dense one beside it: there is nothing to draw")
    figure = Figure(figsize=(max(5.7, 1.2 + 2.6 * len(groups)), 4.6), layout="constrained")
    axes = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    names = sorted({log.name for log in first}, key=lambda name: (name != "dense", name != "auto", name))
    colours = {name: f"C{number}" for number, name in enumerate(n for n in names if n != "dense")}
    for panel, group in zip(axes, groups, strict=True):
        own = [log for log in first if log.group == group]
        target = wanted[own[0].key]
        for log in sorted(own, key=lambda log: names.index(log.name)):
            _draw(panel, log, target, colours.get(log.name, "black"))
        panel.axhline(target, linestyle="--", linewidth=1, color="gray", label="target")
        panel.set_xlim(left=0)
        panel.set_title(f"{group[1].replace('+', ', ')}, {group[0]}", size=10)
        panel.set_xlabel("seconds of training")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    low, high = min(wanted[log.key] for log in first), max(max(log.curve.smoothed) for log in first)
    axes[0].set_ylim(low * (1 - _BETTER), min(high * (1 + _BETTER), low * (1 + _WORSE)))
    axes[0].set_ylabel(f"loss on unseen files, mean of {SMOOTHED_OVER} evaluations")
    labelled = [panel.get_legend_handles_labels() for panel in axes]
    handles = {name: handle for pair in labelled for handle, name in zip(*pair, strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=150)


def _draw(axes: Any, log: Log, target: float, colour: str) -> None:
    place, begin = log.at(target), SMOOTHED_OVER - 1
    seconds, values = log.curve.seconds[begin:], log.curve.smoothed
    axes.plot(seconds, values, color=colour, linewidth=1.6, label=log.name)
    at, mark = (-1, "x") if place is None else (place - begin, "o")
    axes.plot(seconds[at], values[at], mark, color=colour, markersize=8)
