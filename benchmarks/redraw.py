"""Draws pictures of the documentation anew, from the figures they were made of: python benchmarks/redraw.py

For when the drawing has changed and the measurement has not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradsieve_tools.bench import traffic
from gradsieve_tools.bench.step import timeline_plot
from gradsieve_tools.bench.step.measure import Plan
from gradsieve_tools.bench.step.timeline import THREADS, Event, Step

RESULTS = Path(__file__).parent / "results"
DATE = "2026-11-15"
SHOWN = ("exdyna", "spardl", "oktopk", "deft", "cltk", "gtopk", "topk", "randomk")
"""Of all schemes, those with a way of their own: the others gather as `topk` does."""


def load(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def draw_traffic() -> None:
    result = load(f"traffic-all-schemes-{DATE}")
    rows = [row for row in result["rows"] if row["scheme"] in SHOWN]
    config = result["config"]
    traffic.plot(rows, config["params"], config["density"], RESULTS / f"traffic-all-schemes-{DATE}.png")


def steps_in(trace: dict[str, Any]) -> list[Step]:
    """Of a trace that `bench step --trace` wrote: every event but the one that spans a whole step."""
    steps: dict[str, dict[int, list[Event]]] = {}
    for each in trace["traceEvents"]:
        if each["ph"] == "X" and each["name"] != each["cat"]:
            start, stop = each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6
            event = Event(THREADS[each["tid"]], each["name"], each["args"]["unit"], start, stop)
            steps.setdefault(each["cat"], {}).setdefault(each["pid"], []).append(event)
    return [Step(sync, [ranks[rank] for rank in sorted(ranks)]) for sync, ranks in steps.items()]


def draw_timelines() -> None:
    for workload in ("mlp", "transformer"):
        for rate in ("100mbit", "1gbit", "unshaped"):
            run = f"{workload}-{rate}-{DATE}"
            config = load(f"step-{run}")["config"]
            plan = Plan(
                hosts=config["hosts"],
                rate=config["rate"],
                delay=config["delay"],
                workload=config["workload"],
                params=config["params"],
                density=config["density"],
                syncs=config["syncs"],
                rounds=config["rounds"],
            )
            timeline_plot.plot(steps_in(load(f"trace-{run}")), plan, RESULTS / f"timeline-{run}.png")


if __name__ == "__main__":
    draw_traffic()
    draw_timelines()
