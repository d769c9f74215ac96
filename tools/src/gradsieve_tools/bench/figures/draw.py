"""One function for each kind of figure that `gradsieve figure` draws."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve_tools import stages
from gradsieve_tools.bench.figures.data import Curve, Row, Training, labels
from gradsieve_tools.bench.plots import REFERENCES, look

_MARKERS = "os^Dv"
# Running means over as many parts of a training: steps are noisy, trends are what a figure shows
_WINDOWS = 40
_AS_MANY_BITS = 1.1  # budgets found in training differ by a few per cent and are compared all the same


def over_steps(
    axes: Any,
    trainings: Sequence[Training],
    column: str,
    label: str,
    *,
    log: bool = False,
    smooth: bool = False,
) -> None:
    """Draw a line a training against steps; single steps are faint beside a running mean."""
    drawn, names = False, labels(trainings)
    for training, name in zip(trainings, names, strict=True):
        steps, values = training.column(column)
        if not steps:
            continue
        drawn, style = True, look(name, names)
        if smooth:
            axes.plot(steps, values, color=style["color"], alpha=0.2, linewidth=0.8)
            values = running_mean(values, len(values) // _WINDOWS)
        axes.plot(steps, values, label=name, **style, **({} if smooth else {"marker": ".", "markersize": 4}))
    if not drawn:
        raise ConfigError(
            f"none of the files has {column}: it is recorded by other schemes, or in another way"
        )
    if column == "density":
        for target in {training.header.density for training in trainings if training.header.density < 1.0}:
            axes.axhline(target, color="gray", linestyle=":", label=f"target {target:g}")
    if column == "imbalance":
        axes.axhline(1.0, color="gray", linestyle=":", label="balanced")
    if log:
        axes.set_yscale("log")
    axes.set_xlabel("steps")
    axes.set_ylabel(label)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    window = max(1, window)
    sums = list(accumulate(values, initial=0.0))
    return [(sums[end] - sums[max(0, end - window)]) / min(end, window) for end in range(1, len(values) + 1)]


def over_seconds(axes: Any, curves: Sequence[Curve]) -> None:
    """A metric against seconds of training."""
    names = [curve.sync for curve in curves]
    for curve in curves:
        axes.plot(curve.seconds, curve.values, label=curve.sync, **look(curve.sync, names))
    metric = curves[0].metric
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(
        "test accuracy, more is better" if metric == "accuracy" else "loss on unseen data, less is better"
    )


def breakdown(axes: Any, trainings: Sequence[Training]) -> None:
    """Stacked bars, one a training; a mark for the whole step, behind which the exchange may hide."""
    found = [training.stages() for training in trainings]
    names = [name for name in stages.EXCHANGE_STAGES if any(name in stages for stages in found)]
    places, bottom = range(len(found)), [0.0] * len(found)
    for name in names:
        heights = [1e3 * stages.get(name, 0.0) for stages in found]
        axes.bar(places, heights, 0.6, bottom=bottom, color=stages.STAGE_COLOURS[name], label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    whole = [1e3 * training.step_seconds() for training in trainings]
    axes.plot(places, whole, "D", color="black", label="whole training step")
    axes.set_xticks(places, [re.sub(", |:", "\n", name) for name in labels(trainings)])
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("milliseconds a step, mean over ranks")


def against_ranks(axes: Any, rows: Sequence[Row], column: str, label: str) -> None:
    by_sync = _by_sync(rows, column)
    for number, (sync, own) in enumerate(by_sync.items()):
        worlds = [row.world for row in own]
        values = [row.figures[column] for row in own]
        axes.plot(worlds, values, label=sync, marker=_MARKERS[number % 5], **look(sync, [*by_sync]))
    _rank_axis(axes, rows)
    axes.set_yscale("log")
    axes.set_ylabel(label)


def speed_up(axes: Any, rows: Sequence[Row]) -> None:
    """Processor time of top-k's selection over that of a scheme, with the same ranks."""
    column = "select_ms"
    by_sync = _by_sync(rows, column)
    if "topk" not in by_sync:
        raise ConfigError("selection is compared with top-k's: add topk to --schemes")
    base = {row.world: row.figures[column] for row in by_sync["topk"]}
    for number, (sync, own) in enumerate(by_sync.items()):
        worlds = [row.world for row in own]
        ratios = [base[row.world] / row.figures[column] for row in own]
        axes.plot(worlds, ratios, label=sync, marker=_MARKERS[number % 5], **look(sync, [*by_sync]))
    worlds = sorted({row.world for row in rows})
    axes.plot(worlds, worlds, ":", color="gray", label="linear: P times")
    _rank_axis(axes, rows)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("speed-up of selection over top-k")


def against_teams(axes: Any, rows: Sequence[Row]) -> None:
    """SparDL's step against d; dense and the limit as lines across."""
    teams: dict[int, float] = {}
    for row in rows:
        name, _, settings = row.sync.partition(":")
        given = dict(each.partition("=")[::2] for each in settings.split("+"))
        if name == "spardl" and ", recorded" not in row.sync and given.get("teams", "1").isdigit():
            teams[int(given.get("teams", "1"))] = row.figures["step_ms"]
    if len(teams) < 2:
        raise ConfigError("a line against d needs two numbers of teams at least: spardl,spardl:teams=2")
    places = sorted(teams)
    axes.bar(
        [str(place) for place in places], [teams[place] for place in places], 0.5, color="C0", label="SparDL"
    )
    for row, style in zip([row for row in rows if row.sync in REFERENCES], ("--", ":"), strict=False):
        axes.axhline(row.figures["step_ms"], color="black", linestyle=style, label=row.sync)
    axes.set_xlabel(f"teams d of {rows[0].world} ranks")
    axes.set_ylabel("milliseconds a training step")


def gap_against_bits(axes: Any, rows: Sequence[Row]) -> None:
    """Draw for each sync the settings that no other of it beats with as many bits; the others as points."""
    best: dict[str, dict[tuple[str, float | None, float | None], Row]] = {}
    for row in rows:
        name, figures = row.sync.partition(":")[0], row.figures
        if figures.get("gap") is None or not figures.get("bits") or name == "dense":
            continue
        own = best.setdefault(name, {})
        setting = (row.sync, figures.get("density"), figures.get("budget"))
        if setting not in own or _worth(row) > _worth(own[setting]):
            own[setting] = row
    if not best:
        raise ConfigError("none of the files has gap and bits: see gradsieve figure --list for the command")
    for number, (name, own) in enumerate(best.items()):
        points = sorted((row.figures for row in own.values()), key=lambda figures: figures["bits"])
        style = {"marker": _MARKERS[number % 5], **look(name, [*best])}
        beaten = [p for p in points if any(_beats(other, p) for other in points)]
        axes.scatter(*_places(beaten), color=style["color"], marker=style["marker"], alpha=0.35)
        kept = [p for p in points if p not in beaten]
        axes.errorbar(
            *_places(kept), [p.get("gap_spread") or 0.0 for p in kept], label=name, capsize=3, **style
        )
    axes.axhline(0.0, color="black", linewidth=2.5, label="dense")
    axes.set_xscale("log")
    for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        which(lambda value, _: f"{value:.2g}")
    axes.set_xlabel("bits a parameter and step, sent or received by the busiest rank")
    axes.set_ylabel("worse than dense by: per cent of the loss, or points")


def gap_against_ranks(axes: Any, rows: Sequence[Row]) -> None:
    """A colour for each budget; lines join trainings that differ in ranks alone."""
    best: dict[tuple[float, int, float], Row] = {}
    for row in rows:
        figures = row.figures
        if figures.get("gap") is not None and figures.get("budget") and figures.get("batch"):
            place = (figures["budget"], row.world, figures["batch"])
            best[place] = max(row, best.get(place, row), key=_worth)
    lines: dict[tuple[float, str, float], list[Row]] = {}
    for (budget, world, batch), row in sorted(best.items(), key=lambda item: item[0]):
        lines.setdefault((budget, "-", batch), []).append(row)
        lines.setdefault((budget, "--", batch / world), []).append(row)
    lines = {key: line for key, line in lines.items() if len(line) > 1}
    if not lines:
        raise ConfigError("no two rows differ in ranks alone: see gradsieve figure --list for the command")
    budgets = sorted({budget for budget, _, _ in lines})
    for (budget, style, _), line in lines.items():
        number = budgets.index(budget)
        axes.errorbar(
            [row.world for row in line],
            [row.figures["gap"] for row in line],
            [row.figures.get("gap_spread") or 0.0 for row in line],
            label=f"{budget:g} bits" + (", one batch a rank" if style == "--" else ""),
            **look(f"{budget:g}", [f"{each:g}" for each in budgets])
            | {"linestyle": style, "marker": _MARKERS[number % 5], "capsize": 3},
        )
    _rank_axis(axes, list(best.values()))
    axes.axhline(0.0, color="black", linewidth=2.5, label="dense")
    axes.set_ylabel("loss above dense's, per cent")


def _worth(row: Row) -> tuple[float, float]:
    """Prefer more seeds, then the better rate."""
    return row.figures.get("seeds") or 1, -row.figures["gap"]


def _beats(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(one["bits"] < _AS_MANY_BITS * other["bits"] and one["gap"] < other["gap"])


def _places(points: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    return [point["bits"] for point in points], [point["gap"] for point in points]


def _by_sync(rows: Sequence[Row], column: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.world):
        if row.figures.get(column) and ", recorded" not in row.sync:
            found.setdefault(row.sync, []).append(row)
    if not found:
        raise ConfigError(f"none of the files has {column}: see gradsieve figure --list for the command")
    return found


def _rank_axis(axes: Any, rows: Sequence[Row]) -> None:
    worlds = sorted({row.world for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds, [f"{world:,}" for world in worlds])
    axes.minorticks_off()
    axes.set_xlabel("ranks P")
