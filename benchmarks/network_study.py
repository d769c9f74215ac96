"""The picture of docs/simulate.md, from the results of `gradsieve simulate` that it names.

python benchmarks/network_study.py --out benchmarks/results/networks-2026-11-16.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
TOPOLOGIES = ("star", "fat-tree", "torus", "dragonfly", "two-clouds")
SCHEMES = ("dense", "topk", "stripes", "oktopk", "exdyna", "spardl")
LINKS, DELAYS, TEAMS = ("1gbit", "25gbit"), ("10us", "1ms", "10ms"), (1, 2, 4, 8, 16)
MARKS = "os^Dvx"


def seconds(name: str) -> dict[str, float]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"simulate-{name}-2026-11-16.json").read_text())[
        "rows"
    ]
    return {row["scheme"]: row["exchange_seconds"] for row in rows}


def topologies(axes: Axes) -> None:
    found = [seconds(f"topology-{name}") for name in TOPOLOGIES]
    for scheme, mark in zip(SCHEMES, MARKS, strict=True):
        axes.plot(
            TOPOLOGIES, [1e3 * each[scheme] for each in found], marker=mark, ls="none", ms=8, label=scheme
        )
    axes.set(yscale="log", ylabel="an exchange, ms", title="64 ranks, 100 M parameters, 10 Gbit/s")
    axes.tick_params(axis="x", rotation=20)


def teams(axes: Axes) -> None:
    for link, line in zip(LINKS, ("-", "--"), strict=True):
        for delay, colour in zip(DELAYS, ("tab:blue", "tab:orange", "tab:green"), strict=True):
            found = seconds(f"teams-{link}-{delay}")
            best = [1e3 * found[f"spardl:teams={count}"] for count in TEAMS]
            axes.plot(
                range(len(TEAMS)), best, line, color=colour, marker="o", label=f"{link}, {delay} a link"
            )
    axes.set_xticks(range(len(TEAMS)), [str(count) for count in TEAMS])
    axes.set(yscale="log", xlabel="SparDL's teams", ylabel="an exchange, ms", title="64 ranks at one switch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for draw, axes in ((topologies, left), (teams, right)):
        draw(axes)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), handlelength=3.5)
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    main()
