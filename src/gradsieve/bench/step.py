"""`gradsieve bench step`: the time of a whole training step, every sync in one run on a lab network.

`noop` (no communication) is the limit and `dense` what people run today; both are always among the syncs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gradsieve.bench.in_lab import Rows, rows_from_hosts
from gradsieve.bench.rivals import RIVALS
from gradsieve.bench.timeline import Step, read

COLUMNS = ["sync", "step_ms", "vs_noop", "vs_dense", "bytes_sent", "density", "hidden"]
ALWAYS = ["noop", "dense"]


@dataclass(frozen=True, slots=True)
class Plan:
    hosts: int
    rate: str | None
    delay: str | None
    workload: str
    params: int
    density: float
    syncs: list[str]
    rounds: int


def ours(plan: Plan) -> list[str]:
    return [sync for sync in plan.syncs if sync not in (*ALWAYS, *RIVALS)]


def measure(plan: Plan) -> tuple[Rows, list[Step]]:
    """One row a sync, and the last step of each of ours."""
    rows: list[dict[str, Any]] = rows_from_hosts("gradsieve.bench.step_worker", asdict(plan))
    steps = [
        Step(row["sync"], [read(events) for events in row.pop("timeline")])
        for row in rows
        if "timeline" in row
    ]
    return rows, steps
