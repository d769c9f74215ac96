"""The picture of `bench schemes`: what an update is worth against what it costs, one panel a model.

Shown are the most ranks and the highest density measured. Far left and high up is good. A hollow marker
stands for an update of another size than was asked for, by more than a quarter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_NEAR = 1.25
_DPI = 150
_SHAPES = "os^D"
_GAP = 7.0
"""Points between a marker and its name, at least."""
_TURNS, _ROUNDS = 16, 12
"""Places tried around a marker, and at how many distances."""

Box = tuple[float, float, float, float]
"""Left, bottom, right, top in pixels."""


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # the `plot` extra, not needed to measure
    from matplotlib.figure import Figure

    world, density = max(row["world"] for row in rows), max(row["density"] for row in rows)
    shown = [row for row in rows if (row["world"], row["density"]) == (world, density)]
    models = list(dict.fromkeys(row["model"] for row in shown))
    schemes = list(dict.fromkeys(row["scheme"] for row in shown))
    figure = Figure(figsize=(5.5 * len(models), 5.5), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{world} ranks, density {density:g}: energy captured against words moved\n"
        "filled markers: about as many elements as asked for; hollow: more or fewer",
        size=10,  # so that it fits over one panel
    )
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    panels[0].set_ylabel("energy captured / best of as many elements")
    named = [
        _draw(axes, [row for row in shown if row["model"] == model], schemes)
        for model, axes in zip(models, panels, strict=True)
    ]
    figure.draw_without_rendering()  # panels have their places now, so that names can have theirs
    figure.set_layout_engine("none")
    for axes, own in zip(panels, named, strict=True):
        _name(axes, own)
    figure.savefig(path, dpi=_DPI)


def _draw(axes: Any, rows: Sequence[dict[str, Any]], schemes: Sequence[str]) -> list[dict[str, Any]]:
    """The markers of one model; those rows that have one."""
    silent = [row["scheme"] for row in rows if not row["of_target"]]
    sending = [row for row in rows if row["of_target"]]
    axes.set_xscale("log")
    for row in sending:
        place = schemes.index(row["scheme"])
        colour, shape = f"C{place % 10}", _SHAPES[place // 10 % len(_SHAPES)]
        face = colour if 1 / _NEAR <= row["of_target"] <= _NEAR else "white"
        axes.plot(row["words"], row["fidelity"], shape, color=colour, markerfacecolor=face, markersize=7)
    axes.set_ylim(min([-0.08, *(row["fidelity"] - 0.08 for row in sending)]), 1.08)
    axes.margins(x=0.15)
    axes.set_title(f"{rows[0]['model']}, {rows[0]['n']:,} parameters")
    axes.set_xlabel("4-byte words moved by the busiest rank in a step")
    axes.grid(alpha=0.3)
    if silent:
        axes.text(
            0.98, 0.02, f"sent nothing: {', '.join(silent)}", ha="right", size=8, transform=axes.transAxes
        )
    return sending


def _name(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Each marker's name next to it, where it covers no marker and no other name."""
    from matplotlib.text import Text

    renderer, point = axes.figure.canvas.get_renderer(), axes.figure.dpi / 72
    frame = axes.get_window_extent(renderer).extents
    markers = [axes.transData.transform((row["words"], row["fidelity"])) for row in rows]
    taken = [(x - 5 * point, y - 5 * point, x + 5 * point, y + 5 * point) for x, y in markers]
    taken += [text.get_window_extent(renderer).extents for text in axes.texts]
    for row, (x, y) in sorted(zip(rows, markers, strict=True), key=lambda each: tuple(each[1])):
        name = axes.annotate(
            row["scheme"],
            xy=(row["words"], row["fidelity"]),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=8,
            zorder=1.5,  # its line ends under the marker
            arrowprops={"arrowstyle": "-", "color": "gray", "lw": 0.5, "shrinkA": 0, "shrinkB": 4},
        )
        extent = Text.get_window_extent(name, renderer)
        boxes = _boxes(x, y, extent.width, extent.height, _GAP * point)
        free = (
            box for box in boxes if _inside(box, frame) and not any(_overlap(box, each) for each in taken)
        )
        box = next(free, extent.extents)
        name.set_position(((box[0] - x) / point, (box[1] - y) / point))
        taken.append(box)


def _boxes(x: float, y: float, width: float, height: float, gap: float) -> Iterator[Box]:
    """Places for a name around a marker, nearest first, to the right before others."""
    for distance in (gap * (1 + step) for step in range(_ROUNDS)):
        for turn in range(_TURNS):
            angle = 2 * math.pi * turn / _TURNS
            across, up = math.cos(angle), math.sin(angle)
            left = x + across * distance + (across - 1) / 2 * width
            bottom = y + up * distance + (up - 1) / 2 * height
            yield left, bottom, left + width, bottom + height


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _inside(box: Sequence[float], frame: Sequence[float]) -> bool:
    return frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]
