"""Predictions held against a lab: `gradsieve bench plan`.

For each case (hosts, rate, delay): the doctor measures a profile there; every sync's exchange is timed alone
and in a training step; both are predicted from the profile and from the step without communication. What was
measured of a case is kept in the folder, next to its profile: it is not run again, but predicted again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gradsieve.errors import ConfigError, GradsieveError
from gradsieve_tools.bench.common.in_lab import Rows, lab_of, rows_from_hosts
from gradsieve_tools.bench.step import measure as step
from gradsieve_tools.emulation.topology import MOST_HOSTS, read
from gradsieve_tools.emulation.units import parse_delay, parse_rate
from gradsieve_tools.plan import MARGIN, Model, costs_of, named, predict, profiles

_WHERE = ["hosts", "rate", "delay", "network"]
COLUMNS = [*_WHERE, "sync", "exchange_ms", "predicted_exchange_ms", "exchange_off"]
COLUMNS += ["step_ms", "predicted_ms", "off"]
SYNCS = ["dense", "fp16", "powersgd", "auto", "topk", "exdyna", "deft", "oktopk", "spardl"]
GRID = [
    (hosts, rate, delay)
    for hosts in (2, 4, 8, 16)
    for rate in ("20mbit", "100mbit", "1gbit")
    for delay in ("0ms", "5ms", "20ms")
]
_NO_EXCHANGE_ALONE = ("powersgd", "auto")  # torch's hook needs DDP; a budget needs a training
_DOCTOR_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Place:
    hosts: int
    rate: str | None
    delay: str | None
    network: str | None = None  # network file, instead of rate and delay

    def __str__(self) -> str:
        return Path(self.network).stem if self.network else f"{self.rate}-{self.delay}"

    def __post_init__(self) -> None:
        parse_rate(self.rate)
        parse_delay(self.delay)
        if not 2 <= self.hosts <= MOST_HOSTS:
            raise ConfigError(f"hosts is {self.hosts}; here it is 2 to {MOST_HOSTS}")


@dataclass(frozen=True, slots=True)
class Case:
    place: Place
    params: int
    density: float
    syncs: Sequence[str]
    rounds: int

    def __str__(self) -> str:
        return f"{self.place.hosts}-hosts-{self.place}-{self.params}"


def places(text: str) -> list[Place]:
    if text == "grid":
        return [Place(*each) for each in GRID]
    found = []
    for each in text.split(","):
        if each.endswith(".toml"):
            found.append(Place(len(read(Path(each)).hosts), None, None, each))
            continue
        hosts, _, links = each.partition(":")
        rate, _, delay = links.partition(":")
        if not (hosts.isdecimal() and rate and delay):
            raise ConfigError(f"{each!r} is not such as 4:1gbit:5ms, which is hosts:rate:delay")
        found.append(Place(int(hosts), rate, delay))
    return found


def run_all(cases: Sequence[Case], folder: Path, advance: Callable[[str], None]) -> tuple[Rows, list[str]]:
    """The rows of all cases, also of those from before, and what went wrong in others."""
    rows, failed = [], []
    for case in cases:
        path = folder / f"{case}.json"
        try:
            if not path.exists():
                part = path.with_suffix(".part")
                part.write_text(json.dumps(measure(case, path.with_suffix(".toml")), allow_nan=False))
                part.rename(path)
            rows += compare(case, profiles.read(path.with_suffix(".toml")), **json.loads(path.read_text()))
        except GradsieveError as error:
            failed.append(f"{case}: {error}")
        advance(str(case))
    return rows, failed


def measure(case: Case, profile: Path) -> dict[str, dict[str, float]]:
    """Milliseconds of exchanges and of steps, after the doctor has written its profile."""
    _examine(case, profile)
    alone = [sync for sync in case.syncs if sync not in _NO_EXCHANGE_ALONE]
    place = case.place
    config = {**asdict(case), **asdict(place), "syncs": alone, "turns": 2 * case.rounds + 1}
    rows = rows_from_hosts("gradsieve_tools.plan_validation.worker", config)
    syncs = [*step.ALWAYS, *(sync for sync in case.syncs if sync not in step.ALWAYS)]
    where = (place.hosts, place.rate, place.delay)
    plan = step.Plan(*where, "mlp", case.params, case.density, syncs, case.rounds, network=place.network)
    return {
        "exchanges": {row["sync"]: row["exchange_ms"] for row in rows},
        "steps": {row["sync"]: row["step_ms"] for row in step.measure(plan)[0]},
    }


def compare(
    case: Case, profile: profiles.Profile, exchanges: dict[str, float], steps: dict[str, float]
) -> Rows:
    costs, compute = costs_of(profile), steps["noop"] / 1e3
    model = Model(case.params, compute / 3, 2 * compute / 3, on_host=True)
    rows: Rows = []
    for sync in [sync for sync in steps if sync != "noop"]:
        predicted = predict(named(sync, model, costs, case.density), model, costs)
        exchange, whole = exchanges.get(sync), 1e3 * (predicted.cost.link + predicted.cost.computed)
        row: dict[str, Any] = {**asdict(case.place), "sync": sync}
        row |= {"exchange_ms": exchange, "predicted_exchange_ms": whole}
        row |= {"exchange_off": whole / exchange - 1 if exchange else None, "step_ms": steps[sync]}
        rows.append(
            row | {"predicted_ms": 1e3 * predicted.step, "off": 1e3 * predicted.step / steps[sync] - 1}
        )
    return rows


def _examine(case: Case, profile: Path) -> None:
    argv = [sys.executable, "-m", "gradsieve_tools.cli.main", "doctor", "--profile", str(profile.resolve())]
    profile.unlink(missing_ok=True)
    with lab_of(asdict(case.place)) as lab:
        codes = lab.run(argv, timeout=_DOCTOR_SECONDS)
    if not profile.exists():
        raise GradsieveError(f"the doctor left no profile; exit codes {codes}, its output is above")


def summary(rows: Rows) -> dict[str, float]:
    """Errors over all rows, and how often the quickest predicted option is near the quickest measured."""
    found = {"combinations": float(len(rows))}
    for name, key in (("exchange", "exchange_off"), ("step", "off")):
        off = [abs(row[key]) for row in rows if row[key] is not None]
        if off:
            found |= {f"{name}_median_off": median(off), f"{name}_most_off": max(off)}
    near = [_choice(own) <= 1 + MARGIN for own in _by_case(rows)]
    return found | {"cases": float(len(near)), "choices_within_margin": sum(near) / max(1, len(near))}


def _by_case(rows: Rows) -> list[Rows]:
    cases: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        cases.setdefault(tuple(map(row.get, _WHERE)), []).append(row)
    return list(cases.values())


def _choice(rows: Rows) -> float:
    """Measured step of what the plan would take, dense where nothing is clearly faster, over the best one."""
    dense = next(row for row in rows if row["sync"] == "dense")
    quickest = min(rows, key=lambda row: float(row["predicted_ms"]))
    is_near = dense["predicted_ms"] <= (1 + MARGIN) * quickest["predicted_ms"]
    return float((dense if is_near else quickest)["step_ms"] / min(row["step_ms"] for row in rows))
