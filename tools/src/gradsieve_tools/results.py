"""What a bench leaves behind: a JSON file that says how it came about, and a table for a person.

    {command, date, versions, config, rows}

A figure without its command, its settings and the versions it was measured with is hearsay.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import gradsieve
from gradsieve.errors import ConfigError

Row = Mapping[str, Any]


def write(path: Path, config: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """The result as JSON. NaN and infinity are refused: other readers of JSON refuse them too."""
    result = {**origin(), "config": dict(config), "rows": [dict(row) for row in rows]}
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


def origin() -> dict[str, Any]:
    """Return how a result came about."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"command": list(sys.argv), "date": date, "versions": versions()}


def writable(path: Path | None) -> None:
    """Say now, rather than after minutes of measuring, that a result cannot be written there."""
    try:
        if path is not None and not path.exists():
            path.touch()
            path.unlink()  # an interrupted run leaves no empty result behind
        elif path is not None:
            path.open("a").close()
    except OSError as error:
        raise ConfigError(f"the result cannot be written: {error}") from error


def hosts_of(hosts: Sequence[int]) -> dict[str, Any]:
    return {"hosts": hosts[0] if len(hosts) == 1 else list(hosts)}


def versions() -> dict[str, str | int]:
    import torch  # late: a picture of an old result needs none of it

    return {
        "gradsieve": gradsieve.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count() or 0,
    }


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Aligned text: numbers to the right, names to the left, `-` for no value, `1 to 2` for a range."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(map(len, texts)) for texts in zip(columns, *cells, strict=True)]
    numeric = [all(_is_number(row.get(column)) for row in rows) for column in columns]

    def line(texts: Sequence[str]) -> str:
        aligned = zip(texts, widths, numeric, strict=True)
        padded = (text.rjust(width) if right else text.ljust(width) for text, width, right in aligned)
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, [columns, ["-" * width for width in widths], *cells]))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " to ".join(map(_cell, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
