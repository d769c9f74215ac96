"""The picture of `bench schemes`: what an update is worth against what it costs, one panel a model.

Shown are the most ranks and the highest density measured. Far left and high up is good. A hollow marker
stands for an update of another size than was asked for, by more than a quarter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NEAR = 1.25
_DPI = 150
_SHAPES = "os^D"


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure  # the `plot` extra, not needed to measure

    world, density = max(row["world"] for row in rows), max(row["density"] for row in rows)
    shown = [row for row in rows if (row["world"], row["density"]) == (world, density)]
    models = list(dict.fromkeys(row["model"] for row in shown))
    schemes = list(dict.fromkeys(row["scheme"] for row in shown))
    figure = Figure(figsize=(2.5 + 5.5 * len(models), 5.5), layout="constrained")
    figure.suptitle(
        f"{world} ranks, density {density:g}: energy captured against words moved\n"
        "filled markers: about as many elements as asked for; hollow: more or fewer",
        size=10,  # so that it fits over one panel
    )
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    panels[0].set_ylabel("energy captured / best of as many elements")
    drawn: dict[str, Any] = {}
    for model, axes in zip(models, panels, strict=True):
        drawn |= _draw(axes, [row for row in shown if row["model"] == model], schemes)
    figure.legend(drawn.values(), drawn.keys(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=_DPI)


def _draw(axes: Any, rows: Sequence[dict[str, Any]], schemes: Sequence[str]) -> dict[str, Any]:
    """The markers of one model, by scheme."""
    silent = [row["scheme"] for row in rows if not row["of_target"]]
    sending = [row for row in rows if row["of_target"]]
    axes.set_xscale("log")
    drawn = {}
    for row in sending:
        place = schemes.index(row["scheme"])
        colour, shape = f"C{place % 10}", _SHAPES[place // 10 % len(_SHAPES)]
        face = colour if 1 / _NEAR <= row["of_target"] <= _NEAR else "white"
        (drawn[row["scheme"]],) = axes.plot(
            row["words"], row["fidelity"], shape, color=colour, markerfacecolor=face, markersize=7
        )
    axes.set_ylim(min([-0.08, *(row["fidelity"] - 0.08 for row in sending)]), 1.08)
    axes.margins(x=0.15)
    axes.set_title(f"{rows[0]['model']}, {rows[0]['n']:,} parameters")
    axes.set_xlabel("4-byte words moved by the busiest rank in a step")
    axes.grid(alpha=0.3)
    if silent:
        axes.text(
            0.98, 0.02, f"sent nothing: {', '.join(silent)}", ha="right", size=8, transform=axes.transAxes
        )
    return drawn
