"""Predictions held against what others measured on real GPUs: `gradsieve bench plan --against FILE`.

The file has steps of DDP, LocalSGD and DiLoCo on four hosts, and NCCL's sums without any training. Nothing is
tuned to the rows that are compared, those of DDP and LocalSGD: the one constant that is fitted (`STALLED`)
comes from DiLoCo's exchanges. Where links were not shaped their rate is what NCCL's long sums moved there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.common.in_lab import Rows
from gradsieve_tools.plan import Model, costs_of, named, predict, profiles

COLUMNS = ["algorithm", "every", "rate_mbit", "step_ms", "predicted_ms", "off"]
_WORLD, _PARAMETERS, _DEVICE = 4, 30_846_720, "l40s"
# Seconds. The source has 22.6 ms for both and 4.6 ms for the optimizer, behind which nothing hides, as
# nothing does behind forward.
_FORWARD, _BACKWARD = 22.6e-3 / 3 + 4.6e-3, 2 * 22.6e-3 / 3
_LATENCY = 100e-6  # seconds of a round: `gradsieve plan`'s assumption
_LONG = 1 << 26  # bytes from which on a sum by NCCL takes what its bytes take


@dataclass(frozen=True, slots=True)
class Cluster:
    rows: Rows
    rate: float  # bit/s that NCCL's long sums move where nothing is shaped
    source: str

    @classmethod
    def read(cls, path: Path) -> Cluster:
        try:
            found = json.loads(path.read_text())
            curve = [each["achieved_bps"] for each in found["nccl_all_reduce"] if each["msg_bytes"] >= _LONG]
            return cls(found["rows"], median(curve), found["source"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} has no steps of a GPU cluster: {error!r}") from error

    def rate_of(self, row: dict[str, Any]) -> float:
        return float(row["link_bps"]) if row["shaped"] else self.rate


def compare(cluster: Cluster) -> Rows:
    model = Model(_PARAMETERS, _FORWARD, _BACKWARD)
    rows: Rows = []
    for row in cluster.rows:
        if row["algorithm"] not in ("ddp", "localsgd"):
            continue
        costs = costs_of(profiles.by_hand(_DEVICE, _WORLD, cluster.rate_of(row), _LATENCY))
        dense = named("dense", model, costs, 0.01)
        if row["algorithm"] == "localsgd":
            dense = replace(dense, hidden="not")
        # Timed steps are few: 180 of them hold one exchange in 128, not 1.4.
        exchanges = row["steps_timed"] // row["H"] / row["steps_timed"]
        exchange = predict(dense, model, costs).step - model.compute
        predicted, measured = 1e3 * (model.compute + exchanges * exchange), float(row["mean_step_ms"])
        found = {"algorithm": row["algorithm"], "every": row["H"], "rate_mbit": row["link_bps"] / 1e6}
        found |= {"step_ms": measured, "predicted_ms": predicted, "off": predicted / measured - 1}
        rows.append(found)
    return rows


def fit_stalled(cluster: Cluster, without: float = 0.0) -> float:
    """STALLED by DiLoCo's exchanges of every step over shaped links, by least squares of what they take over
    what their bytes take; `without` those at one rate."""
    rows = [row for row in cluster.rows if row["algorithm"] == "diloco" and row["H"] == 1 and row["shaped"]]
    kept = [row for row in rows if row["link_bps"] != without]
    slower = [1 / float(row["link_bps"]) for row in kept]
    excess = [times(row) - 1 for row in kept]
    return sum(a * b for a, b in zip(slower, excess, strict=True)) / sum(a * a for a in slower)


def times(row: dict[str, Any]) -> float:
    bits = 2 * (_WORLD - 1) / _WORLD * 32 * _PARAMETERS
    seconds = float(row["blocked_s"]) / int(row["steps_timed"])
    return seconds * float(row["link_bps"]) / bits


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    off = [abs(row["off"]) for row in rows]
    return {"points": len(off), "median_off": median(off), "most_off": max(off)}
