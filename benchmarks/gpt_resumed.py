"""Whether a run of examples/gpt that was stopped and resumed has the curve of one that was not.

    python benchmarks/gpt_resumed.py runs/whole runs/resumed --plot resumed.png

Compares what both told at the same steps, and draws them over each other. The exit code is 1 if they differ.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def curve(run: Path) -> dict[int, float]:
    """Of the lines that a step has, the last: what was told before a death is told again."""
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def plot(whole: dict[int, float], resumed: dict[int, float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes: Any = figure.add_subplot()
    axes.plot(whole.keys(), whole.values(), color="black", linewidth=5, alpha=0.3, label="undisturbed")
    axes.plot(
        resumed.keys(), resumed.values(), "o-", color="C0", linewidth=1.2, markersize=4, label="resumed"
    )
    for number, step in enumerate(sorted(resumed.keys() - whole.keys())):
        name = "stopped and started again" if number == 0 else None
        axes.axvline(step, color="C3", linestyle="--", label=name)
    axes.set_xlabel("steps")
    axes.set_ylabel("loss on unseen files")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("whole", type=Path, help="--out of the run that was not stopped")
    parser.add_argument("resumed", type=Path, help="--out of the one that was")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw both there")
    args = parser.parse_args()
    whole, resumed = curve(args.whole), curve(args.resumed)
    both = sorted(whole.keys() & resumed.keys())
    most = max(abs(whole[step] - resumed[step]) for step in both)
    print(f"{len(both)} evaluations to step {both[-1]}; their losses differ by {most:g} at most")
    if args.plot is not None:
        plot(whole, resumed, args.plot)
    return int(most > 0)


if __name__ == "__main__":
    raise SystemExit(main())
