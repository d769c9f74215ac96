"""`gradsieve bench collectives`: by messages of our own, and by gloo itself, on hosts of a lab."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gradsieve_tools.bench.common.in_lab import Rows, rows_from_hosts

COLUMNS = ["hosts", "op", "bytes", "bare_ms", "engine_ms", "rounds_ms", "direct_ms", "chosen", "faster"]


@dataclass(frozen=True, slots=True)
class Plan:
    hosts: int
    rate: str | None
    delay: str | None
    sizes: Sequence[int]  # bytes that a rank hands in
    rounds: int


def measure(plan: Plan) -> Rows:
    rows = rows_from_hosts("gradsieve_tools.bench.collectives.worker", asdict(plan))
    return [{"hosts": plan.hosts, **row} for row in rows]
