"""A report as text, as a heat map, as JSON and as a profile."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve_tools.doctor.evaluate_links import SLOW
from gradsieve_tools.doctor.findings import Matrix, exit_code
from gradsieve_tools.doctor.run import Report
from gradsieve_tools.profiles import MOST_PAIRS, ModelProfile, Pairs, Profile, Rows
from gradsieve_tools.quantities import BITS, SECONDS, spoken
from gradsieve_tools.results import origin, table

_MOST_IN_TABLE = 16
_MANY_LABELS = 40


def text(report: Report) -> str:
    parts = [_ranks(report), *_network(report), _model(report), _findings(report), _verdict(report)]
    return "\n\n".join(part for part in parts if part)


def _ranks(report: Report) -> str:
    rows = []
    for each in report.facts:
        at, answer = each.listens_on, report.answers.get(each.rank)
        used = report.measured.connections.get(each.rank, {})
        row: dict[str, Any] = {
            "rank": each.rank,
            "host": each.alias or each.hostname,
            "gloo listens on": f"{at.name} {at.address}" if at is not None else "nowhere",
            "connections": ", ".join(f"{name} {count}" for name, count in sorted(used.items())),
            "threads": each.threads,
            "processors": each.cores,
            "kernels": each.kernels.partition(" ")[0],
        }
        if answer is not None and not answer.error:
            row |= {"memory GB/s": answer.memory / 1e9, "select M/s": answer.selection / 1e6}
        rows.append(row)
    return table(rows, list(dict.fromkeys(key for row in rows for key in row)))


def _network(report: Report) -> list[str]:
    measured, names = report.measured, {each.rank: each.name for each in report.facts}
    slow = extreme(measured.bandwidth, min)
    if slow is None:
        return []
    far = extreme(measured.latency, max)
    parts = []
    if report.world <= _MOST_IN_TABLE:
        parts = [
            f"Mbit/s, row sends, column receives\n{_matrix(measured.bandwidth, 1e-6)}",
            f"latency in us, a word each way at once\n{_matrix(measured.latency, 1e6)}",
        ]
    (i, j), bits = slow
    lines = [f"slowest pair: {names[i]} to {names[j]}, {spoken(bits, BITS, 3)}"]
    if far is not None:
        (i, j), seconds = far
        lines.append(f"farthest pair: {names[i]} and {names[j]}, {spoken(seconds, SECONDS, 3)}")
    if (ring := measured.ring) is not None:
        rate = spoken(ring.bandwidth, BITS, 3)
        lines.append(
            f"a sum by gloo, around a ring: {spoken(ring.latency, SECONDS, 3)} however short, {rate}"
        )
    return [*parts, "\n".join(lines)]


def _model(report: Report) -> str:
    model = report.measured.model
    if model is None:
        return ""
    size = f"model: {model.parameters:,} parameters, units of exchange: {model.units}"
    if model.forward is None or model.backward is None:
        return f"{size}; the factory gives no loss, so that no step was measured"
    times = [spoken(seconds, SECONDS, 3) for seconds in (model.forward, model.backward)]
    return f"{size}; forward {times[0]}, backward {times[1]}"


def _findings(report: Report) -> str:
    return "\n".join(
        f"{each.severity.upper():8}{each.what}\n{'':8}fix: {each.fix}" for each in report.findings
    )


def _verdict(report: Report) -> str:
    counts = [
        f"{count} {severity}{'s' if count > 1 else ''}"
        for severity in ("error", "warning")
        if (count := sum(each.severity == severity for each in report.findings))
    ]
    return f"{' and '.join(counts)}" if counts else "all is well"


def _matrix(matrix: Matrix, factor: float) -> str:
    rows: list[dict[str, Any]] = []
    for rank, row in enumerate(matrix):
        cells = {str(other): None if value is None else factor * value for other, value in enumerate(row)}
        rows.append({"rank": rank, **cells})
    return table(rows, ["rank", *map(str, range(len(matrix)))])


def extreme(matrix: Matrix, choose: Callable[..., Any]) -> tuple[tuple[int, int], float] | None:
    """The pair with the least or greatest figure."""
    found = [((i, j), v) for i, row in enumerate(matrix) for j, v in enumerate(row) if v is not None]
    return choose(found, key=lambda entry: entry[1]) if found else None


def write_json(path: Path, report: Report) -> None:
    measured = report.measured
    result = {
        **origin(),
        "config": {"world": report.world},
        "exit_code": exit_code(report.findings),
        "rows": [asdict(finding) for finding in report.findings],
        "facts": [asdict(each) for each in report.facts],
        "latency_seconds": measured.latency,
        "bandwidth_bits_a_second": measured.bandwidth,
        "ranks": {rank: asdict(answer) for rank, answer in sorted(report.answers.items())},
    }
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


def profile_of(report: Report) -> Profile:
    """Pairs on different hosts, where there are such: a profile is of a network."""
    answers = [each for each in report.answers.values() if not each.error]
    latency = _between(report, report.measured.latency)
    bandwidth = _between(report, report.measured.bandwidth)
    if not answers or not latency or not bandwidth:
        raise ConfigError("a profile needs figures of a network: two ranks at least that could be measured")
    is_small = report.world <= MOST_PAIRS
    made = origin()
    return Profile(
        world=report.world,
        hosts=len({each.host for each in report.facts}),
        latency=statistics.median(latency),
        bandwidth=statistics.median(bandwidth),
        message=statistics.median(each.message for each in answers),
        slowest_latency=max(latency),
        slowest_bandwidth=min(bandwidth),
        memory=min(each.memory for each in answers),
        selection=min(each.selection for each in answers),
        launch=max(each.launch for each in answers),
        ring=report.measured.ring,
        pairs=Pairs(_rows(report.measured.latency), _rows(report.measured.bandwidth)) if is_small else None,
        model=_model_profile(report),
        made={
            "date": made["date"],
            "command": " ".join(["gradsieve", *made["command"][1:]]),
            **{name: str(value) for name, value in made["versions"].items()},
        },
    )


def _model_profile(report: Report) -> ModelProfile | None:
    model = report.measured.model
    if model is None or not model.parameters:
        return None
    return ModelProfile(model.parameters, max(1, model.units), model.forward, model.backward)


def _between(report: Report, matrix: Matrix) -> list[float]:
    hosts = [each.host for each in report.facts]
    entries = [(i, j, v) for i, row in enumerate(matrix) for j, v in enumerate(row) if v is not None]
    apart = [value for i, j, value in entries if hosts[i] != hosts[j]]
    return apart or [value for _, _, value in entries]


def _rows(matrix: Matrix) -> Rows:
    return tuple(tuple(row) for row in matrix)


def draw(report: Report, out: Path) -> None:
    """Draw two heat maps: bandwidth and latency of every pair."""
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    side = min(max(4.2, 0.62 * report.world + 1.8), 14.0)
    figure = Figure(figsize=(2 * side, side), layout="constrained")
    names = [f"{each.rank} {each.alias or each.hostname}" for each in report.facts]
    bandwidth, latency = report.measured.bandwidth, report.measured.latency
    maps = ((bandwidth, 1e-6, "bandwidth (Mbit/s)", "viridis"), (latency, 1e3, "latency (ms)", "viridis_r"))
    for axes, (matrix, factor, title, colours) in zip(figure.subplots(1, 2), maps, strict=True):
        values = factor * np.array([[np.nan if v is None else v for v in row] for row in matrix], dtype=float)
        seen = values[np.isfinite(values) & (values > 0)]
        # A range of at least what counts as slow: noise should not look like a fault.
        norm = LogNorm(min(seen.min(), seen.max() / SLOW), seen.max()) if seen.size else None
        figure.colorbar(axes.imshow(values, norm=norm, cmap=colours), ax=axes, shrink=0.8)
        axes.set(title=title, xlabel="receives", ylabel="sends")
        if len(matrix) <= _MOST_IN_TABLE:
            for i, j in zip(*np.nonzero(np.isfinite(values)), strict=True):
                box = {"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 1}
                axes.text(j, i, f"{values[i, j]:.3g}", ha="center", va="center", fontsize=8, bbox=box)
        if len(names) <= _MANY_LABELS:
            axes.set_xticks(range(len(names)), names, rotation=90 if len(names) > 6 else 0, fontsize=8)
            axes.set_yticks(range(len(names)), names, fontsize=8)
    figure.savefig(out, dpi=150)
