"""Small recordings for tests of what shows them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradsieve_tools.records import Header, Line, path_of, text_of

HEADER = Header(
    name="run", scheme="topk", exchange="steps", density=0.01, rank=0, world=3, parameters=1000, every=5
)


def plain(entry: Header | Line) -> dict[str, Any]:
    """What a recorder gives its file for such a line."""
    out: dict[str, Any] = json.loads(text_of(entry))
    return out


def line_of(step: int, rank: int = 0) -> Line:
    """Rank 2 comes last, and the others wait for it."""
    return Line(
        step=step,
        at=0.1 * step,
        density=0.03,
        bits=0.5 + 0.01 * rank,
        seconds={"select": 0.002, "exchange": 0.005 if rank == 2 else 0.035, "waiting": 0.03},
        threshold=0.25,
        imbalance=2.0 + rank,
        cut=0.5,
        waiting=4.0 if step % 5 == 0 else None,
        age=12.0 if step % 5 == 0 else None,
        loss=1.0 / step,
    )


def write(folder: Path, steps: int = 40, header: Header = HEADER) -> list[Path]:
    """A file a rank."""
    folder.mkdir(exist_ok=True)
    paths = [path_of(folder / "run", rank) for rank in range(header.world)]
    for rank, path in enumerate(paths):
        lines = (text_of(line_of(step, rank)) for step in range(1, steps + 1))
        path.write_text(text_of(replace(header, rank=rank)) + "".join(lines))
    return paths
