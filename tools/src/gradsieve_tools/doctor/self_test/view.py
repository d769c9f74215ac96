"""The self-test as a table, and as the one file that is attached to an issue."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gradsieve_tools.doctor.self_test.findings import exit_code, percent
from gradsieve_tools.doctor.self_test.run import Report
from gradsieve_tools.results import origin, table

_WIDTH = 100
_ROOM = 68  # columns for the figure


def text(report: Report) -> str:
    parts = [_device(report), _findings(report), _kernels(report), _advice(report), _verdict(report)]
    return "\n\n".join(part for part in parts if part)


def _device(report: Report) -> str:
    there = report.device
    named = f" ({there['name']})" if there["name"] else ""
    forms = " and ".join(there["kernels"])
    return f"device: {there['type']}{named}; kernels by {forms}; 2 ranks over the loopback"


def _findings(report: Report) -> str:
    rows: list[dict[str, Any]] = []
    for each in report.findings:
        first, *more = textwrap.wrap(each.found, _ROOM) or [""]
        rows.append({"check": each.check, "verdict": each.verdict, "found": first})
        rows += [{"check": "", "verdict": "", "found": line} for line in more]
    return table(rows, ["check", "verdict", "found"])


def _kernels(report: Report) -> str:
    """Return all of them by name: the table has the slowest one alone."""
    figures = next((each.figures for each in report.findings if each.check == "bandwidth"), {})
    if not figures:
        return ""
    shares = (f"{name} {percent(rate / figures['copy'])}" for name, rate in figures["kernels"].items())
    return textwrap.fill(f"share of a copy's bandwidth: {', '.join(shares)}", _WIDTH)


def _advice(report: Report) -> str:
    return "\n".join(f"{each.check}: {each.fix}" for each in report.findings if each.verdict == "failed")


def _verdict(report: Report) -> str:
    count = sum(each.verdict == "failed" for each in report.findings)
    said = f"{count} of {len(report.findings)} checks failed" if count else "all is well"
    return f"{said}, in {report.seconds:.0f} s"


def write_json(path: Path, report: Report) -> None:
    made = origin()
    result = {
        "date": made["date"],
        "versions": made["versions"] | {name: _version(name) for name in ("numba", "numpy", "triton")},
        "device": report.device,
        "exit_code": exit_code(report.findings),
        "seconds": report.seconds,
        "rows": [_finite(asdict(each)) for each in report.findings],
    }
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(each) for key, each in content.items()}
    if isinstance(content, list):
        return [_finite(each) for each in content]
    return str(content) if isinstance(content, float) and not math.isfinite(content) else content


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
