"""One frame of `gradsieve watch`: what the last steps of a training looked like.

Texts from files reach the terminal only as plain, printable characters.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradsieve.errors import printable
from gradsieve_tools.records import Line
from gradsieve_tools.stages import EXCHANGE_STAGES, OTHER, STAGE_COLOURS, WAITING
from gradsieve_tools.watch.follow import WINDOW, Folder, Rank, silent_for

_BLOCKS = " ▁▂▃▄▅▆▇█"
_STOPPED = 10.0  # times a step, and least seconds, after which a silent rank is called stopped
_BAR = 60
_WORTH = 0.005  # share of an exchange from which a stage is named
_SHOWN = 8  # most other trainings, unreadable files and stopped ranks


def frame(folder: Folder) -> RenderableType:
    trainings = folder.trainings()
    running = [ranks for ranks in trainings if any(rank.lines for rank in ranks)]
    parts: list[RenderableType] = []
    if not running:
        there = "no step is recorded there yet" if folder.path.is_dir() else "there is no such folder yet"
        parts.append(Text(f"{plain(str(folder.path))}: {there}", "bold"))
    else:
        parts += _training(running[0])
        for ranks in running[1 : _SHOWN + 1]:
            parts.append(Text(f"also here: {_name(ranks)}, step {_last(ranks):,}", "dim"))
    for path, said in list(folder.unreadable.items())[:_SHOWN]:
        parts.append(Text(f"not read: {plain(path.name)}: {plain(said)}", "yellow"))
    if folder.left_out:
        parts.append(Text(f"{folder.left_out:,} more files are not looked at", "yellow"))
    return Group(*parts)


def plain(text: str, most: int = 120) -> str:
    return printable(text)[:most]


def _name(ranks: Sequence[Rank]) -> str:
    return plain(ranks[0].header.name)


def _last(ranks: Sequence[Rank]) -> int:
    return max(rank.lines[-1].step for rank in ranks if rank.lines)


def _training(ranks: Sequence[Rank]) -> list[RenderableType]:
    header = ranks[0].header
    about = f"{plain(header.scheme)} · {header.world} ranks · {header.parameters:,} parameters"
    known = [rank for rank in ranks if rank.lines]
    step_seconds = _step_seconds(known)
    return [
        Text(f"{_name(ranks)}", "bold")
        + Text(f"   {about} · target density {header.density:g}", "not bold dim"),
        _figures(known, step_seconds),
        *_stages(known),
        *_slowest(known, step_seconds),
        *_stopped(ranks, step_seconds),
        Text(f"of the last {WINDOW} steps; q or Ctrl-C ends this view, not the training", "dim"),
    ]


def _step_seconds(ranks: Sequence[Rank]) -> float | None:
    gaps = [
        (after.at - before.at) / (after.step - before.step)
        for rank in ranks
        for before, after in pairwise(rank.lines)
    ]
    return statistics.median(gaps) if gaps else None


def _figures(ranks: Sequence[Rank], step_seconds: float | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "now", "mean", "trend"):
        table.add_column(column, justify="left" if column in ("", "trend") else "right", no_wrap=True)
    table.add_row("step", f"{_last(ranks):,}")
    if step_seconds:
        table.add_row("steps/s", f"{ranks[0].header.period / step_seconds:.3g}")
    rows: list[tuple[str, str, str]] = [
        ("loss", "loss", "{:.4g}"),
        ("bits a parameter", "bits", "{:.4g}"),
        ("density", "density", "{:.4g}"),
        ("threshold", "threshold", "{:.4g}"),
        ("imbalance f(t)", "imbalance", "{:.3g}"),
        ("share of ranks cut", "cut", "{:.1%}"),
        ("age of the residual, steps", "age", "{:.4g}"),
        ("norm of the residual", "waiting", "{:.4g}"),
    ]
    for title, name, form in rows:
        values = _over_ranks(ranks, lambda line, name=name: getattr(line, name))  # type: ignore[misc]
        kept = [rank.kept[name] for rank in ranks if name in rank.kept]
        if values:
            table.add_row(
                title, form.format(values[-1]), form.format(statistics.fmean(values)), _trend(values)
            )
        elif kept:
            table.add_row(title, form.format(statistics.fmean(kept)))
    return table


def _over_ranks(ranks: Sequence[Rank], figure: Callable[[Line], float | None]) -> list[float]:
    """Means over ranks of the steps that have it."""
    by_step: dict[int, list[float]] = {}
    for rank in ranks:
        for line in rank.lines:
            value = figure(line)
            if value is not None:
                by_step.setdefault(line.step, []).append(value)
    return [statistics.fmean(by_step[step]) for step in sorted(by_step)]


def _trend(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    shown = values[-30:]
    if high <= low:
        return _BLOCKS[4] * len(shown)
    return "".join(_BLOCKS[1 + round(7 * (value - low) / (high - low))] for value in shown)


def _stages(ranks: Sequence[Rank]) -> list[RenderableType]:
    """A bar, and below it what its colours mean, in milliseconds a step."""
    lines = [line for rank in ranks for line in rank.lines]
    names = dict.fromkeys(name for line in lines for name in line.seconds)
    means = {name: statistics.fmean(line.seconds.get(name, 0.0) for line in lines) for name in names}
    waited = means.pop(WAITING, None)
    total = sum(means.values())
    if not total:
        return []
    known = [name for name in EXCHANGE_STAGES if name in means]
    bar, shown = Text("exchange  "), []
    for name in [*known, *(name for name in means if name not in known)]:
        colour = STAGE_COLOURS.get(name, OTHER)
        bar.append("█" * round(_BAR * means[name] / total), colour)
        if means[name] >= _WORTH * total:
            label = f"{plain(name, 12)} {1e3 * means[name]:.3g} ms"
            shown.append(Text("■ ", colour).append(f"{label:<22}", "default"))
    rows = [Text.assemble(" " * 10, *shown[at : at + 3]) for at in range(0, len(shown), 3)]
    found: list[RenderableType] = [bar, *rows]
    if waited is not None:
        found.append(Text(f"          the training thread waited {1e3 * waited:.3g} ms a step for it"))
    return found


def _slowest(ranks: Sequence[Rank], step_seconds: float | None) -> list[RenderableType]:
    """The rank that spends least in collectives is the one that the others wait for there."""
    spent = {
        rank.header.rank: {
            line.step: line.seconds["exchange"] for line in rank.lines if "exchange" in line.seconds
        }
        for rank in ranks
    }
    virtual = any(line.xi is not None for rank in ranks for line in rank.lines)
    common = set.intersection(*(set(each) for each in spent.values())) if spent else set()
    if len(spent) < 2 or not common or not step_seconds or virtual:
        return []
    means = {rank: statistics.fmean(each[step] for step in common) for rank, each in spent.items()}
    slowest = min(means, key=lambda rank: means[rank])
    others = statistics.fmean(mean for rank, mean in means.items() if rank != slowest) - means[slowest]
    share = others / step_seconds
    text = f"slowest   rank {slowest}: the others wait for it {1e3 * others:.3g} ms a step ({share:.0%})"
    return [Text(text, "yellow" if share > 0.1 else "")]


def _stopped(ranks: Sequence[Rank], step_seconds: float | None) -> list[RenderableType]:
    limit = _STOPPED * max(1.0, step_seconds or 0.0)
    silent = [rank for rank in ranks if silent_for(rank) > limit]
    if len(silent) == len(ranks):
        least = min(map(silent_for, silent))
        return [Text(f"no rank has written for {least:,.0f} s: it is over, or all wait", "yellow")]
    return [
        Text(
            f"silent    rank {rank.header.rank}: last step "
            f"{rank.lines[-1].step if rank.lines else 0:,}, {silent_for(rank):,.0f} s ago",
            "bold red",
        )
        for rank in silent[:_SHOWN]
    ]
