"""Rows of a study drawn: step and efficiency against ranks, and how evenly links are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from gradsieve_tools.simulate.study import MOST_SIMULATED

Row: TypeAlias = dict[str, Any]

_EFFICIENCY = "efficiency: step without communication / step, %"
_MARKERS = "os^Dv<>P*X"


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
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
        for axes, what, times in ((step, "step_seconds", 1e3), (efficiency, "efficiency", 1e2)):
            (_curve if len(worlds) > 1 else _bar)(axes, own, what, times, look)
        for row in own:
            if row.get("links"):
                _loads(load, row, look)
    for axes, label in ((step, "milliseconds a step, nothing hidden"), (efficiency, _EFFICIENCY)):
        if len(worlds) > 1:
            _against_ranks(axes, worlds, label)
        else:
            _of_one_world(axes, worlds[0], label)
    if len(worlds) > 1:
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


def _of_one_world(axes: Any, world: int, label: str) -> None:
    axes.set_title(f"{world:,} ranks")
    axes.set_ylabel(label)
    axes.tick_params("x", rotation=30)
    axes.grid(axis="y", alpha=0.3)


def _bar(axes: Any, rows: Sequence[Row], what: str, times: float, look: dict[str, Any]) -> None:
    value = times * rows[0][what]
    bars = axes.bar([rows[0]["scheme"]], [value], color=look["color"], label=look["label"])
    axes.bar_label(bars, [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"])


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
        hollow = {"markerfacecolor": "white", "markevery": slice(len(further) - len(beyond), None)}
        dashed = look | {"linestyle": "--", "label": None} | hollow
        axes.plot([row["world"] for row in further], [times * row[what] for row in further], **dashed)


def _loads(axes: Any, row: Row, look: dict[str, Any]) -> None:
    shares = sorted((100 * share for share in row["links"].values()), reverse=True)
    shares += [0.0] * (row["number_of_links"] - len(shares))
    places = [100 * (number + 0.5) / len(shares) for number in range(len(shares))]
    axes.plot(places, shares, color=look["color"], linestyle=look["linestyle"])
