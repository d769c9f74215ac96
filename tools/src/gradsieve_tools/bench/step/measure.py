"""`gradsieve bench step`: the time of a whole training step, every sync in one run on a lab network.

`noop` (no communication) is the limit and `dense` what people run today; both are always among the syncs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gradsieve_tools.bench.common.idle import IDLE
from gradsieve_tools.bench.common.in_lab import Rows, rows_from_hosts
from gradsieve_tools.bench.common.workloads import WORKLOADS as REAL
from gradsieve_tools.bench.common.workloads import check_size
from gradsieve_tools.bench.rivals.names import RIVALS
from gradsieve_tools.bench.step.timeline import Step, read
from gradsieve_tools.emulation.units import parse_rate

WORKLOADS = (*REAL, IDLE)
RATIOS = ["vs_noop", "vs_dense"]
COLUMNS = ["hosts", "sync", "late", "step_ms"]
COLUMNS += [f"{ratio}{part}" for ratio in RATIOS for part in ("", "_half")]
COLUMNS += ["bytes_sent", "bits", "of_link", "density", "hidden"]
ALWAYS = ["noop", "dense"]

_MOST_APART = 1.5  # largest ratio over the middle half of the rounds: beyond, a rerun may show another median
_FEWEST_ROUNDS = 3


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
    record: str | None = None  # folder: our syncs run a second time with a recorder
    network: str | None = None  # network file, instead of one rate and delay
    compute: float = 0.3  # seconds that an idle workload's device computes
    ahead: bool = False
    spins: bool = False  # the idle host runs ahead of its device; our thread spins while it waits

    def __post_init__(self) -> None:
        if self.workload != IDLE:  # which has any size
            check_size(self.workload, self.params)


def ours(plan: Plan) -> list[str]:
    return [sync for sync in plan.syncs if sync not in (*ALWAYS, *RIVALS)]


def unclear(rows: Rows) -> str | None:
    """A line on ratios that say nothing, because the rounds differ too much; None if there are none."""
    if len(rows[0]["step_ms_all"]) < _FEWEST_ROUNDS:
        return f"Fewer than {_FEWEST_ROUNDS} rounds show no spread, so the ratios say little: raise --rounds."
    doubtful = [
        f"{ratio} of {row['sync']} ({low:g} to {high:g})"
        for ratio in RATIOS
        for row in rows
        for low, high in [row[f"{ratio}_half"]]
        # Noop is the limit: whether something takes a little more or less than it is no question.
        if high > _MOST_APART * low or (ratio == "vs_dense" and low < 1 < high)
    ]
    if not doubtful:
        return None
    return (
        f"Rounds differ too much for a verdict on {', '.join(doubtful)}: "
        "more --rounds, larger --params or an idle machine would help."
    )


def of_link(row: dict[str, Any], rows: Rows, rate: str | None) -> float | None:
    """Return what a step sends over what a rank's link carries during a step without communication."""
    bits_a_second = parse_rate(rate)
    if bits_a_second is None:
        return None
    limit = float(next(each["step_ms"] for each in rows if each["sync"] == "noop"))
    return round(8e3 * float(row["bytes_sent"]) / bits_a_second / limit, 3)


def measure(plan: Plan) -> tuple[Rows, list[Step]]:
    """Return one row a sync, and the last step of each of ours."""
    rows: list[dict[str, Any]] = rows_from_hosts("gradsieve_tools.bench.step.worker", asdict(plan))
    for row in rows:
        row["hosts"] = plan.hosts
        row["of_link"] = of_link(row, rows, plan.rate)
    steps = [
        Step(row["sync"], [read(events) for events in row.pop("timeline")])
        for row in rows
        if "timeline" in row
    ]
    return rows, steps
