"""Rows of a study drawn: step and efficiency against ranks, and how evenly links are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from gradsieve_tools.bench import plots
from gradsieve_tools.simulate.study import MOST_SIMULATED

Row: TypeAlias = dict[str, Any]


def figure(rows: Sequence[Row], title: str) -> Any:
    """Return three panels; worlds that were extrapolated are hollow."""
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    by_scheme = {
        name: sorted((row for row in rows if row["scheme"] == name), key=lambda row: int(row["world"]))
        for name in schemes
    }

    def against_ranks(column: str, times: float) -> Callable[[Any], None]:
        def lines(axes: Any) -> None:
            for name, own in by_scheme.items():
                style, beyond = plots.look(name, schemes), [row for row in own if row["extrapolated"]]
                worlds, values = [row["world"] for row in own], [times * row[column] for row in own]
                axes.plot(worlds, values, label=name, marker="o", **style)
                further = [times * row[column] for row in beyond]
                axes.plot([row["world"] for row in beyond], further, "wo", markeredgecolor=style["color"])
            worlds = sorted({row["world"] for row in rows})
            axes.set_xscale("log", base=2)
            axes.set_xticks(worlds, [f"{world:,}" for world in worlds])
            axes.set_yscale("log" if column == "step_seconds" else "linear")

        return lines

    def loads(axes: Any) -> None:
        for row in rows:
            if row.get("links"):
                shares = sorted((100 * share for share in row["links"].values()), reverse=True)
                shares += [0.0] * (row["number_of_links"] - len(shares))
                places = [100 * (number + 0.5) / len(shares) for number in range(len(shares))]
                axes.plot(places, shares, **plots.look(row["scheme"], schemes))
        axes.set_yscale("log")

    ranks = f"ranks P (beyond {MOST_SIMULATED:,} extrapolated)"
    loaded = next((f"{row['world']:,} ranks" for row in rows if row.get("links")), "")
    panels = [
        plots.Panel("nothing hidden", ranks, "milliseconds a step", against_ranks("step_seconds", 1e3)),
        plots.Panel(
            "efficiency", ranks, "step without communication / step, %", against_ranks("efficiency", 1e2)
        ),
        plots.Panel(loaded, "links in order of their load, %", "load, % of the link's rate", loads),
    ]
    return plots.figure(panels, title)
