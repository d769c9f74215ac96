"""`gradsieve bench hsdp`: a step of a model that is sharded inside hosts and replicated between them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.common.in_lab import Rows, rows_from_hosts
from gradsieve_tools.bench.common.workloads import check_size

COLUMNS = ["sync", "step_ms", "vs_noop", "vs_noop_half", "vs_dense", "vs_dense_half", "bytes_sent", "bits"]
MOST_ROWS = 32


@dataclass(frozen=True, slots=True)
class Plan:
    hosts: int
    per_host: int
    rate: str | None
    delay: str | None
    params: int
    batch: int
    rounds: int
    steps: int

    def __post_init__(self) -> None:
        check_size("mlp", self.params)
        if self.hosts < 2 or self.per_host < 1:
            raise ConfigError("two hosts at least, with a rank each: there is nothing to exchange otherwise")
        if not 1 <= self.batch <= MOST_ROWS:
            raise ConfigError(f"a batch has 1 to {MOST_ROWS} rows a rank, not {self.batch}")


def measure(plan: Plan) -> Rows:
    return rows_from_hosts("gradsieve_tools.bench.hsdp.worker", asdict(plan))
