"""How far balance gets, step by step: f(t), the longest selection over the mean, as `bench traffic` sees it.

    python benchmarks/published_balance.py --world 16 --params 1e6 --json FILE --plot FILE.png

Published balance moves one block between neighbours that lie on opposite sides of the mean. Where a loaded
partition has a neighbour that is not below it, nothing moves.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from gradsieve_tools.bench.common.machine import one_thread
from gradsieve_tools.bench.traffic import Case, Fleet, layers
from gradsieve_tools.cli import results

SCHEMES = ("micro-paper", "exdyna-paper", "exdyna")
EVERY = 20


def course(name: str, world: int, sizes: tuple[int, ...], steps: int) -> dict[str, Any]:
    """f in the mean of every twenty steps, and in the end the load of each partition over the mean."""
    fleet = Fleet(Case(name, world, sum(sizes), 0.01, sizes))
    seen = [fleet.step().imbalance or 1.0 for _ in range(steps)]
    means = [round(fmean(seen[at : at + EVERY]), 3) for at in range(0, steps, EVERY)]
    row = {"scheme": name, "world": world, "steps": steps, "every": EVERY, "imbalance": means}
    state = fleet.states[0]
    if hasattr(state, "blocks"):
        row["blocks"] = state.blocks.tolist()
        row["load"] = [round(float(load) * world / state.sent, 2) for load in state.load]
    return row


def plot(rows: list[dict[str, Any]], n: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for row, colour in zip(rows, ("#d55e00", "#0072b2", "#009e73"), strict=True):
        at = [EVERY * (place + 0.5) for place in range(len(row["imbalance"]))]
        axes.plot(at, row["imbalance"], label=row["scheme"], color=colour)
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axes.set_xlabel("step")
    axes.set_ylabel("f(t): longest selection over the mean")
    axes.set_title(
        f"Balance on skewed gradients, {rows[0]['world']} virtual ranks, {n:,} parameters", size=10
    )
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=16)
    parser.add_argument("--params", type=float, default=1e6)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path, required=True)
    args = parser.parse_args()
    sizes = layers("transformer", int(args.params))
    with one_thread():
        rows = [course(name, args.world, sizes, args.steps) for name in SCHEMES]
    for row in rows:
        print(row["scheme"], row["imbalance"][::10], row.get("blocks"), row.get("load"))
    results.write(args.json, {"world": args.world, "params": sum(sizes), "density": 0.01}, rows)
    plot(rows, sum(sizes), args.plot)


if __name__ == "__main__":
    main()
