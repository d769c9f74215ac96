"""A study as one HTML page that needs no network: settings, table, pictures."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gradsieve_tools.report.page import STYLE
from gradsieve_tools.simulate.picture import Row, figure

_HEADINGS = {
    "scheme": "scheme",
    "world": "ranks",
    "exchange_seconds": "exchange, ms",
    "step_seconds": "step, ms, nothing hidden",
    "hidden_step_seconds": "step, ms, all hidden",
    "efficiency": "efficiency, nothing hidden",
    "hidden_efficiency": "efficiency, all hidden",
    "of_dense": "step / dense's",
    "rounds": "rounds",
    "megabytes_sent": "MB sent",
    "busiest_link": "busiest link",
}


def page(rows: Sequence[Row], title: str, settings: Mapping[str, Any]) -> str:
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title>"
    listed = "; ".join(f"{name} {value}" for name, value in settings.items())
    return "\n".join(
        [
            head,
            f"<style>{STYLE}</style><body><h1>{escape(title)}</h1>",
            f"<p class='note'>{escape(listed)}</p>",
            f"<figure style='background:#fff'>{_svg(rows, title)}</figure>",
            "<p class='note'>Simulated, not measured. A row marked * is extrapolated. Efficiency is the step "
            "without communication over the step; real syncs lie between nothing hidden and all hidden.</p>",
            f"<div class='wide'><table>{_table(rows)}</table></div></body></html>",
        ]
    )


def _svg(rows: Sequence[Row], title: str) -> str:
    out = io.StringIO()
    figure(rows, title).savefig(out, format="svg")
    text = out.getvalue()
    return text[text.index("<svg") :]


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in _HEADINGS.values())
    lines = [f"<tr>{head}</tr>"]
    for row in rows:
        cells = "".join(f"<td>{escape(_cell(row, column))}</td>" for column in _HEADINGS)
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join(lines)


def _cell(row: Row, column: str) -> str:
    value = row.get(column)
    if value is None:
        return "-"
    if column == "world":
        return f"{value:,}" + ("*" if row["extrapolated"] else "")
    if column.endswith("_seconds"):
        return f"{1000 * value:,.1f}"
    if column in ("efficiency", "hidden_efficiency", "busiest_link"):
        return f"{value:.1%}"
    return value if isinstance(value, str) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
