"""Rows of a study drawn: step and efficiency against ranks, and how evenly links are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from gradsieve.simulate.study import MOST_SIMULATED

Row: TypeAlias = dict[str, Any]

_MARKERS = "os^Dv<>P*X"


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """As PNG, SVG or PDF, by the path's ending."""
    figure(rows, title).savefig(path, dpi=150)


def figure(rows: Sequence[Row], title: str) -> Any:
    from matplotlib.figure import Figure  # the `plot` extra, not needed to simulate

    made = Figure(figsize=(15, 6.2), layout="constrained")
    step, efficiency, load = made.subplots(1, 3)
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    worlds = sorted({row["world"] for row in rows})
    for number, scheme in enumerate(schemes):
        own = sorted((row for row in rows if row["scheme"] == scheme), key=lambda row: int(row["world"]))
        look = _look(scheme, number)
        _curve(step, own, "step_seconds", 1e3, look)
        _curve(efficiency, own, "efficiency", 1e2, look)
        for row in own:
            if row.get("links"):
                _loads(load, row, look)
    _against_ranks(step, worlds, "milliseconds a step, nothing hidden")
    _against_ranks(efficiency, worlds, "efficiency: step without communication / step, %")
    step.set_yscale("log")
    _plain_numbers(step)
    efficiency.set_ylim(0, 105)
    _against_links(load, rows)
    made.suptitle(title)
    handles, labels = step.get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=min(8, len(schemes)))
    return made


def _against_ranks(axes: Any, worlds: Sequence[int], label: str) -> None:
    beyond = f" (beyond {MOST_SIMULATED:,} extrapolated: dashed)" if worlds[-1] > MOST_SIMULATED else ""
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds, [f"{world:,}" for world in worlds], rotation=30 if len(worlds) > 6 else 0)
    axes.minorticks_off()
    axes.set_xlabel(f"ranks P{beyond}")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)


def _against_links(axes: Any, rows: Sequence[Row]) -> None:
    loaded = [row for row in rows if row.get("links")]
    axes.set_title(f"links at {loaded[0]['world']:,} ranks" if loaded else "")
    axes.set_xlabel("links in order of their load, % of all links")
    axes.set_ylabel("load during the exchange, % of the link's rate")
    axes.set_xlim(0, 100)
    axes.set_yscale("log")
    axes.set_ylim(0.01, 150)
    _plain_numbers(axes)
    axes.grid(alpha=0.3)


def _plain_numbers(axes: Any) -> None:
    """1,000 and not 10^3, also between powers where there are few of these."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    low, high = axes.get_ylim()
    numbers = FuncFormatter(lambda value, _: f"{value:,.10g}")
    axes.yaxis.set_major_formatter(numbers)
    axes.yaxis.set_minor_formatter(numbers if high < 12 * low else NullFormatter())


def _look(scheme: str, number: int) -> dict[str, Any]:
    known = {
        "noop": {"label": "no communication (noop)", "color": "black", "linestyle": ":"},
        "dense": {"label": "dense", "color": "gray"},
    }
    look = {"label": scheme, "color": f"C{number % 10}", "linestyle": "-"} | known.get(scheme, {})
    return look | {"marker": _MARKERS[number % len(_MARKERS)], "markersize": 5}


def _curve(axes: Any, rows: Sequence[Row], what: str, times: float, look: dict[str, Any]) -> None:
    real = [row for row in rows if not row["extrapolated"]]
    beyond = [row for row in rows if row["extrapolated"]]
    axes.plot([row["world"] for row in real], [times * row[what] for row in real], **look)
    if beyond:
        further = [*real[-1:], *beyond]
        dashed = look | {"linestyle": "--", "label": None, "markerfacecolor": "white"}
        axes.plot([row["world"] for row in further], [times * row[what] for row in further], **dashed)


def _loads(axes: Any, row: Row, look: dict[str, Any]) -> None:
    shares = sorted((100 * share for share in row["links"].values()), reverse=True)
    shares += [0.0] * (row["number_of_links"] - len(shares))
    places = [100 * (number + 0.5) / len(shares) for number in range(len(shares))]
    axes.plot(places, shares, color=look["color"], linestyle=look["linestyle"])
