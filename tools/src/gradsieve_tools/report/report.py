"""`gradsieve report`: recordings as one HTML page, that needs nothing else.

The page has no script and loads nothing, and says so to the browser; every text from a file is escaped.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from gradsieve.errors import ConfigError
from gradsieve_tools.report import svg
from gradsieve_tools.report.findings import findings
from gradsieve_tools.report.gathered import Array, Training
from gradsieve_tools.report.page import STYLE
from gradsieve_tools.report.svg import Series
from gradsieve_tools.stages import OTHER, STAGE_COLOURS, WAITING

MOST_TRAININGS = 12
_BINS = 140  # points of a line
_MOST_BARS = 16
_BLUE, _ORANGE, _GREEN = "#1f77b4", "#e6862c", "#2a9d5c"


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    picture: str
    legend: Sequence[tuple[str, str]]  # colours and their meaning
    note: str = ""


def report(trainings: Sequence[Training], title: str) -> str:
    """The whole page."""
    if len(trainings) > MOST_TRAININGS:
        raise ConfigError(
            f"{len(trainings)} trainings are too many for a page: name the files of up to {MOST_TRAININGS}"
        )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>gradsieve: {escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<header><h1>{escape(title)}</h1><p>A gradsieve recording. Lines are means over ranks and over the "
        "steps behind a point; bands hold nine tenths of them.</p></header>",
    ]
    if len(trainings) > 1:
        parts.append(_overview(trainings))
    for number, training in enumerate(trainings):
        parts.append(_chapter(training, number))
    parts.append("</body></html>\n")
    return "".join(parts)


def _overview(trainings: Sequence[Training]) -> str:
    rows = []
    for number, training in enumerate(trainings):
        header = training.header
        cells = [
            f'<a href="#t{number}">{escape(header.name)}</a>',
            escape(header.scheme),
            f"{header.world}",
            f"{int(training.steps[-1]):,}",
            _figure(training.median(training.columns["bits"]), "{:.3g}"),
            _figure(training.median(training.columns["density"]), "{:.3g}"),
            "-" if training.is_virtual else _figure(training.median(1e3 * training.step_seconds), "{:.3g}"),
            _figure(_last_loss(training), "{:.4g}"),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = ["training", "scheme", "ranks", "steps", "bits a parameter", "density", "ms a step", "last loss"]
    head = "".join(f"<th>{each}</th>" for each in heads)
    return f'<section class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></section>'


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _last_loss(training: Training) -> float | None:
    """Mean over the last twentieth of the steps."""
    tail = training.columns["loss"][:, -max(1, len(training.steps) // 20) :]
    known = tail[np.isfinite(tail)]
    return float(known.mean()) if len(known) else None


def _chapter(training: Training, number: int) -> str:
    header = training.header
    facts = [
        header.scheme,
        f"{header.exchange} exchanged",
        f"{header.world} ranks",
        f"{header.parameters:,} parameters",
        f"target density {header.density:g}",
        f"{int(training.steps[-1]):,} steps",
    ]
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in training.notes)
    figures = "".join(map(_shown, charts(training)))
    return (
        f'<section id="t{number}"><h2>{escape(header.name)}</h2><p>{escape(" · ".join(facts))}</p>{notes}'
        f'{_advice(training)}<div class="charts">{figures}</div></section>'
    )


def _advice(training: Training) -> str:
    found = findings(training)
    to_change = [each for each in found if each.change is not None]
    items = "".join(
        f"<li><b>{escape(each.rule)}: {escape(each.figure or '')}</b> (limit: {escape(each.limit)}). "
        f"{escape(each.change or '')}</li>"
        for each in to_change
    )
    rows = "".join(
        f"<tr><td>{escape(each.rule)}</td><td>{escape(each.figure or 'not recorded')}</td>"
        f"<td>{escape(each.limit)}</td></tr>"
        for each in found
    )
    text = (
        f"<ul>{items}</ul>" if items else "<p>Nothing: no figure that was recorded is beyond its limit.</p>"
    )
    return (
        f'<div class="advice"><h3>What to change</h3>{text}'
        "<details><summary>All that was looked at</summary>"
        f'<div class="wide"><table><tr><th>rule</th><th>figure</th><th>limit</th></tr>{rows}</table></div>'
        "</details></div>"
    )


def _shown(chart: Chart) -> str:
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for colour, text in chart.legend
    )
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    head = f'<h3>{escape(chart.title)}</h3><div class="legend">{legend}</div>'
    return f"<figure>{head}{chart.picture}{note}</figure>"


# -- charts ---------------------------------------------------------------------------------------------


def charts(training: Training) -> list[Chart]:
    header, columns = training.header, training.columns
    has_target = header.density < 1.0 and not header.scheme.startswith("stripes")  # they may have a budget
    target = header.density if has_target else None
    found = [
        _over_steps(training, "Loss", "loss, as noted", {"loss": columns["loss"]}),
        _over_steps(
            training, "Bits a step", "bits a parameter and step",
            {"bits": _sparse(training, columns["bits"])}, note=_flush_note(training), from_zero=True,
        ),
        _link(training),
        _stages(training),
        _over_steps(
            training, "Wait for the exchange", "% of a step, by the training thread",
            {} if training.is_virtual else _percent(training, WAITING), from_zero=True,
        ),
        _now_and_then(training, "Age of the residual", "steps", {"age": columns["age"]}),
        _now_and_then(training, "Norm of the residual", "norm", {"norm": columns["waiting"]}),
        _over_steps(
            training, "Imbalance f(t)", "longest selection over the mean", {"f(t)": columns["imbalance"]},
            mark=1.0, note="Dashed: balanced.",
        ),
        _over_steps(
            training, "Density", "share of the elements", {"density": _sparse(training, columns["density"])},
            mark=target, note="" if target is None else f"Dashed: the target, {target:g}.", from_zero=True,
        ),
        _over_steps(training, "Threshold", "size of an element", {"threshold": columns["threshold"]}),
        *_timeline(training),
    ]  # fmt: skip
    return [chart for chart in found if chart is not None]


def _sparse(training: Training, values: Array) -> Array:
    if not _has_flush(training):
        return values
    kept: Array = values.copy()
    kept[:, -1] = np.nan
    return kept


def _has_flush(training: Training) -> bool:
    dense = training.is_dense
    return bool(training.header.density < 1.0 and dense[:, -1].any() and not dense[:, -2].all())


def _flush_note(training: Training) -> str:
    if not _has_flush(training):
        return ""
    bits = float(np.nanmax(training.columns["bits"][:, -1]))
    return f"Not drawn: the last step sent everything, {bits:.3g} bits a parameter."


def _percent(training: Training, stage: str) -> dict[str, Array]:
    if stage not in training.stages:
        return {}
    return {stage: 100 * training.stages[stage] / _positive(training.step_seconds)}


def _positive(values: Array) -> Array:
    return np.where(values > 0, values, np.nan)


def _binned(training: Training, values: Array) -> tuple[Array, Array, Array]:
    """Mean, and where nine tenths lie, of all ranks and steps behind each point."""
    places = _places(training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a bin without figures has none
        parts = [values[:, start:stop] for start, stop in places]
        means = np.array([np.nanmean(part) for part in parts])
        ends = np.array([np.nanpercentile(part, [5, 95]) for part in parts])
    return means, ends[:, 0], ends[:, 1]


def _places(training: Training) -> list[tuple[int, int]]:
    edges = np.linspace(0, len(training.steps), min(_BINS, len(training.steps)) + 1).astype(int)
    return list(pairwise(edges.tolist()))


def _ends(training: Training) -> tuple[int, int]:
    return int(training.steps[0]), int(training.steps[-1])


def _middles(training: Training) -> Array:
    return np.array([training.steps[start:stop].mean() for start, stop in _places(training)])


def _over_steps(
    training: Training,
    title: str,
    unit: str,
    figures: dict[str, Array],
    *,
    mark: float | None = None,
    note: str = "",
    from_zero: bool = False,
) -> Chart | None:
    known = {name: values for name, values in figures.items() if np.isfinite(values).any()}
    if not known:
        return None
    series = [
        Series(name, colour, *_binned(training, values))
        for (name, values), colour in zip(known.items(), (_BLUE, _ORANGE, _GREEN), strict=False)
    ]
    picture = svg.lines(
        _middles(training), _ends(training), series, f"{title}: {unit}", from_zero=from_zero, mark=mark
    )
    legend = [(_BLUE, unit)] if len(series) == 1 else [(one.colour, one.name) for one in series]
    return Chart(title, picture, legend, note)


def _now_and_then(training: Training, title: str, unit: str, figures: dict[str, Array]) -> Chart | None:
    every, last = training.header.every, int(training.steps[-1])
    if last >= 2 * every:
        return _over_steps(training, title, unit, figures, from_zero=True)
    note = (
        f"Not drawn: the record looks at the residual every {every} steps, and has {last}. A line takes two "
        f"looks: train for {2 * every} steps, or give gradsieve.record(..., every={max(1, last // 10)})."
    )
    return Chart(title, "", [], note)


def _link(training: Training) -> Chart | None:
    if training.is_virtual or "exchange" not in training.stages:
        return None
    megabits = 8e-6 * training.bytes
    return _over_steps(
        training,
        "Link use",
        "Mbit/s of a rank",
        {
            "Mbit/s over the whole step": megabits / _positive(training.step_seconds),
            "Mbit/s while in collectives": megabits / _positive(training.stages["exchange"]),
        },
        note="Bytes as the best known algorithms move them; in collectives ranks wait for each other, too.",
        from_zero=True,
    )


def _stages(training: Training) -> Chart | None:
    names = [name for name in training.stages if name != WAITING]
    if not names:
        return None
    series = [
        Series(name, STAGE_COLOURS.get(name, OTHER), 1e3 * _binned(training, training.stages[name])[0])
        for name in names
    ]
    whole, note = None, "Waiting is the training thread's, and has its own chart."
    legend = [(one.colour, one.name) for one in series]
    if not training.is_virtual:
        seconds = np.array(
            [
                np.nanmedian(part)
                if np.isfinite(part := training.step_seconds[:, start:stop]).any()
                else np.nan
                for start, stop in _places(training)
            ]
        )
        whole = Series("whole step", "", 1e3 * seconds)
        legend = [("currentColor", "whole training step (median)"), *legend]
    picture = svg.stacked(
        _middles(training), _ends(training), series, whole, "Time by stage: milliseconds a step"
    )
    return Chart("Time by stage, ms a step", picture, legend, note)


def _timeline(training: Training) -> list[Chart | None]:
    """Draw which rank waited for whom."""
    waits = training.waits
    if not np.isfinite(waits).any():
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        cells = np.array([np.nanmean(waits[:, start:stop], axis=1) for start, stop in _places(training)]).T
    title = "Who waits for others, ms a step"
    picture, legend = svg.grid(_ends(training), training.ranks, 1e3 * cells, title)
    note = "In collectives, beyond the rank that came last. The others wait for a pale row among dark ones."
    counts = 100 * np.bincount(training.last, minlength=len(training.ranks)) / len(training.last)
    order = np.argsort(-counts, kind="stable")[:_MOST_BARS]
    names = [f"rank {training.ranks[row]}" for row in order]
    unit = "% of the steps in which it came last"
    bars = svg.bars(names, [float(counts[row]) for row in order], unit, _ORANGE)
    more = (
        f"The {_MOST_BARS} of {len(training.ranks)} ranks that were last most often."
        if len(order) < len(counts)
        else ""
    )
    return [Chart(title, picture, legend, note), Chart("Whom the others wait for", bars, [], more)]
