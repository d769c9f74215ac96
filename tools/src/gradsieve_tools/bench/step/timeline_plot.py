"""The picture of a step in time: a band a rank, training above and the exchange below it, a panel a sync."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsieve_tools import stages
from gradsieve_tools.bench.step.measure import Plan
from gradsieve_tools.bench.step.timeline import THREADS, Event, Step, hidden

_LANE, _BAND = 0.42, 1.1  # height of a thread's lane, distance of two ranks


def plot(steps: Sequence[Step], plan: Plan, path: Path) -> None:
    from matplotlib.figure import Figure  # the `plot` extra, not needed to measure
    from matplotlib.patches import Patch

    heights = [len(step.ranks) for step in steps]
    figure = Figure(figsize=(12, 1.2 + sum(0.6 * height + 1.0 for height in heights)), layout="constrained")
    panels = figure.subplots(len(steps), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, step in zip(panels, steps, strict=True):
        _draw(axes, step)
    panels[0].set_xlim(0, 1e3 * max(step.stop - step.start for step in steps))  # one axis: lengths compare
    panels[-1].set_xlabel("milliseconds since the first rank began the step")
    links = " and ".join(filter(None, [plan.rate or "unshaped", plan.delay]))
    figure.suptitle(
        f"One training step: {plan.workload} of {plan.params:,} parameters, {plan.hosts} hosts, {links}, "
        f"density {plan.density:g}",
        size=11,
    )
    names = {event.name for step in steps for events in step.ranks for event in events}
    known = [name for name in stages.STAGE_COLOURS if name in names]
    shown = [*known, *sorted(names - set(known))]
    handles = [Patch(color=stages.STAGE_COLOURS.get(name, stages.OTHER), label=name) for name in shown]
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150)


def _draw(axes: Any, step: Step) -> None:
    behind, exchange = map(sum, zip(*map(hidden, step.ranks), strict=True))
    for rank, events in enumerate(step.ranks):
        top = -_BAND * rank
        for event in events:
            _bar(axes, event, step.start, top - _LANE * THREADS.index(event.thread))
    axes.set_yticks(
        [-_BAND * rank - _LANE * lane for rank in range(len(step.ranks)) for lane in range(len(THREADS))],
        [f"rank {rank}  {thread}" for rank in range(len(step.ranks)) for thread in THREADS],
        size=8,
    )
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-_BAND * (len(step.ranks) - 1) - 1.5 * _LANE, 0.8 * _LANE)
    # Where gradients are exchanged, DDP waits for them inside of backward, where it is not seen.
    waits = any(event.name == "waiting" for events in step.ranks for event in events)
    is_sent = exchange and waits
    share = f", {behind / exchange:.0%} of the exchange behind forward and backward" if is_sent else ""
    axes.set_title(f"{step.sync}{share}", size=10, loc="left")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _bar(axes: Any, event: Event, zero: float, middle: float) -> None:
    axes.barh(
        middle,
        1e3 * (event.stop - event.start),
        left=1e3 * (event.start - zero),
        height=0.9 * _LANE,
        color=stages.STAGE_COLOURS.get(event.name, stages.OTHER),
        linewidth=0,
    )
