"""The picture and the table of the README, from result files: python benchmarks/front_picture.py OUT.png

Left: step time against link rate, with the limit. Right: what the same budgets do to the loss. Printed: how
much sooner a training has the accuracy that dense ends with. Where a rate was not measured, the step is
`gradsieve plan`'s and the number of steps that of the measured training, and both are marked as predicted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SMALL, LARGE = 11, 12
"""Points, on a page that shows the picture 700 pixels wide."""
WIDTH = 700 / 96

RESULTS = Path(__file__).parent / "results"
RATES = {"20mbit": 20e6, "100mbit": 1e8, "1gbit": 1e9}
PREDICTED = 1e10
OPTIONS = {"noop": "no communication", "dense": "dense (plain DDP)", "auto": "auto"}
"""Names of `bench step` and of `plan`."""


def rows(name: str, key: str) -> dict[str, dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return {str(row[key]): row for row in found}


def draw_steps(axes: Any) -> None:
    runs = {rate: rows(f"step-bits-transformer-{name}-2026-11-15", "sync") for name, rate in RATES.items()}
    plan = rows("plan-front-25m-10gbit-2026-11-16", "option")
    lines = (
        ("dense", "plain DDP", "tab:red", "o-", (10, 0)),
        ("auto", "gradsieve", "tab:blue", "o-", (0, 9)),
        ("noop", "no communication", "black", "--", (0, -24)),
    )
    for sync, label, colour, style, away in lines:
        seconds = [run[sync]["step_ms"] / 1000 for run in runs.values()]
        axes.plot(list(runs), seconds, style, color=colour, linewidth=2)
        ahead = plan[OPTIONS[sync]]["step_ms"] / 1000
        axes.plot([list(runs)[-1], PREDICTED], [seconds[-1], ahead], ":", color=colour, linewidth=1.5)
        axes.plot([PREDICTED], [ahead], "o", color=colour, markerfacecolor="white")
        axes.annotate(label, (2e7, seconds[0]), away, textcoords="offset points", color=colour, size=LARGE)
    axes.annotate("predicted", (PREDICTED, 1.1), (8, 26), textcoords="offset points", ha="right", size=SMALL)
    axes.set(xscale="log", yscale="log", ylim=(0.5, 100), xlim=(1.6e7, 2e10))
    axes.set_xlabel("rate of each link, bit/s", size=SMALL)
    axes.set_xticks([*RATES.values(), PREDICTED], ["20 M", "100 M", "1 G", "10 G"])
    axes.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"])
    axes.set_title("Seconds per training step", size=LARGE, loc="left")


def draw_loss(axes: Any) -> None:
    for task, file, colour in (
        ("transformer", "accuracy-ranks-4-2000-2026-11-19", "tab:blue"),
        ("lstm", "accuracy-bits-lstm-2026-11-15", "tab:green"),
    ):
        found = [row for row in rows(file, "budget").values() if row["budget"] and row["budget"] <= 1]
        found.sort(key=lambda row: row["budget"])
        bits = [row["bits"] for row in found]
        gaps, spread = [row["gap"] for row in found], [row["gap_spread"] for row in found]
        axes.errorbar(bits, gaps, yerr=spread, fmt="o-", color=colour, capsize=4, linewidth=2)
        name, place = ("LSTM", (0.27, 0.25)) if task == "lstm" else ("transformer", (0.37, 1.9))
        axes.annotate(name, place, color=colour, size=LARGE)
    spent = [rows(f"step-bits-transformer-{name}-2026-11-15", "sync")["auto"]["bits"] for name in RATES]
    axes.axvspan(min(spent), max(spent), color="tab:blue", alpha=0.12)
    axes.annotate("sent on the left", (max(spent), 3.9), (4, -10), textcoords="offset points", size=SMALL)
    axes.axhline(0, color="tab:red", linewidth=2)
    axes.annotate(
        "plain DDP: 48 bits",
        (0.115, 0),
        (0, -15),
        textcoords="offset points",
        color="tab:red",
        size=LARGE,
    )
    axes.set(xscale="log", xlim=(0.11, 1.4), ylim=(-1, 4))
    axes.set_xticks([0.15, 0.3, 0.75], ["0.15", "0.3", "0.75"])
    axes.minorticks_off()
    axes.set_xlabel("bits sent per parameter and step", size=SMALL)
    axes.set_title("Final loss above plain DDP's, %", size=LARGE, loc="left")


def sooner(training: str, plan: str | None = None) -> str:
    """Times as fast as dense to dense's accuracy; with a plan, by its steps."""
    found = rows(training, "sync")
    if plan is None:
        return f"{found['auto']['times_dense']:.1f}"
    steps = rows(plan, "option")
    faster = float(steps[OPTIONS["dense"]]["step_ms"]) / float(steps[OPTIONS["auto"]]["step_ms"])
    return f"{faster * found['dense']['steps'] / found['auto']['steps']:.1f} (predicted)"


def draw(out: Path) -> None:
    figure, (steps, loss) = plt.subplots(1, 2, figsize=(WIDTH, 3.7), constrained_layout=True)
    draw_steps(steps)
    draw_loss(loss)
    for axes in (steps, loss):
        axes.minorticks_off()
        axes.tick_params(labelsize=SMALL)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=192)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
    mlp, transformer = "time-to-accuracy-1gbit-2026-11-15", "time-to-accuracy-transformer-100mbit-2026-11-15"
    table = {
        "MLP, 100 Mbit/s": sooner("time-to-accuracy-100mbit-2026-11-15"),
        "MLP, 1 Gbit/s": sooner(mlp),
        "MLP, 10 Gbit/s": sooner(mlp, "plan-front-mlp-10gbit-2026-11-16"),
        "transformer, 100 Mbit/s": sooner(transformer),
        "transformer, 1 Gbit/s": sooner(transformer, "plan-front-transformer-1gbit-2026-11-16"),
        "transformer, 10 Gbit/s": sooner(transformer, "plan-front-transformer-10gbit-2026-11-16"),
    }
    for case, times in table.items():
        print(f"{case:26}{times}")
