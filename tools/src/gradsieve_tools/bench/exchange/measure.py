"""`gradsieve bench exchange`: a scheme's collectives through our engine, and the same through bare gloo."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gradsieve_tools.bench.common.in_lab import Rows, rows_from_hosts
from gradsieve_tools.bench.common.workloads import check_size

COLUMNS = ["hosts", "what", "ms", "ratio", "bytes_sent"]


@dataclass(frozen=True, slots=True)
class Plan:
    hosts: int
    rate: str | None
    delay: str | None
    scheme: str
    params: int
    density: float
    rounds: int

    def __post_init__(self) -> None:
        check_size("mlp", self.params)


def measure(plan: Plan) -> Rows:
    rows = rows_from_hosts("gradsieve_tools.bench.exchange.worker", asdict(plan))
    return [{"hosts": plan.hosts, **row} for row in rows]
