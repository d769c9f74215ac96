"""What a step takes, for every scheme and number of ranks, on one kind of network.

    step = compute + selection + exchange        nothing of the exchange hidden
    step = max(compute + selection, exchange)    all of it hidden behind the step before or after

A sync lies between the two, so rows have both. Compute and selection are delays from speeds that are stated;
the exchange is simulated, one unit after the other: a model has as many as its gradient has 100 MB (schemes
over the whole model: one), and each takes as long as the first.

Beyond `MOST_SIMULATED` ranks the exchange is extrapolated, a + b log2 P + c P with none of them negative
through all worlds simulated, and its row says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradsieve.errors import ConfigError
from gradsieve.schemes import Scheme
from gradsieve.testing import UNIT_CAP_MB
from gradsieve_tools.simulate.messages import Collectives
from gradsieve_tools.simulate.network import Carried, Network, network
from gradsieve_tools.simulate.platforms import Wires, platform, spread
from gradsieve_tools.simulate.recording import Recorded, effort, rank_steps, recorded
from gradsieve_tools.specs import parse

MOST_SIMULATED = 1024
ALWAYS = ("noop", "dense")  # the limit and the baseline
FEWEST_TO_EXTRAPOLATE = 3
_WORD = 4
# Passes over the gradient: of every sparse step (rebase, check), and of one more look at all of it
_OWN, _SCAN = 1.8, 2.0
_CALLS = 4  # rounds to simulate in a scheme, about, over the ranks that take a step: for the progress bar

COLUMNS = [
    "scheme",
    "world",
    "extrapolated",
    "exchange_seconds",
    "step_seconds",
    "hidden_step_seconds",
    "efficiency",
    "hidden_efficiency",
    "of_dense",
    "rounds",
    "megabytes_sent",
    "units",
    "busiest_link",
    "recorded_n",
    "scaled",
]

Advance = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    schemes: tuple[str, ...]
    worlds: tuple[int, ...]
    topology: str
    wires: Wires
    params: int
    density: float | None = None  # None: each scheme's own
    # How ops are carried; `ours`: as in a training, the engine's rings for dense, rounds for the others
    collectives: Collectives | Literal["ours"] = "ours"
    compute_seconds: float = 0.25  # seconds of forward and backward on a rank that is not slow
    memory_rate: float = 20e9  # bytes a second at which selection reads
    stragglers: int = 0
    straggler_factor: float = 1.0  # how many times longer so many ranks compute

    def __post_init__(self) -> None:
        beyond = [world for world in self.worlds if world > MOST_SIMULATED]
        if beyond and len(self.simulated) < FEWEST_TO_EXTRAPOLATE:
            raise ConfigError(
                f"{beyond[0]:,} ranks are extrapolated (beyond {MOST_SIMULATED:,}) from at least "
                f"{FEWEST_TO_EXTRAPOLATE} worlds that are not: give e.g. --world 64,256,1024,{beyond[0]}"
            )
        for world in self.simulated:
            spread(max(self.stragglers, self.wires.slow_hosts), world)

    @property
    def simulated(self) -> list[int]:
        return [world for world in self.worlds if world <= MOST_SIMULATED]

    @property
    def all_schemes(self) -> list[str]:
        return [*ALWAYS, *(name for name in self.schemes if name not in ALWAYS)]

    def scheme(self, text: str) -> Scheme[Any]:
        own = parse(text)
        return own if self.density is None or own.round_robin else parse(text, self.density)

    def way(self, scheme: Scheme[Any]) -> Collectives:
        if self.collectives == "ours":
            return "ring" if scheme.lossless else "log"
        return self.collectives

    def units(self, scheme: Scheme[Any]) -> int:
        cap = int(UNIT_CAP_MB * 2**20) // _WORD
        return 1 if scheme.whole_model else math.ceil(self.params / cap)

    def unit(self, scheme: Scheme[Any]) -> int:
        """Elements in one."""
        return math.ceil(self.params / self.units(scheme))

    def work(self) -> float:
        return sum(
            self._work(self.scheme(text), world) for text in self.all_schemes for world in self.simulated
        )

    def _work(self, scheme: Scheme[Any], world: int) -> float:
        return effort(scheme) * rank_steps(scheme, self.unit(scheme), world) + _CALLS * world


def run(plan: Plan, advance: Advance = lambda work, doing: None) -> list[dict[str, Any]]:
    """The rows of all schemes and worlds, and at the largest simulated one the load of each link."""
    rows = []
    for world in plan.simulated:
        with network(platform(plan.topology, world, plan.wires)) as over:
            rows += [_row(plan, text, world, over, advance) for text in plan.all_schemes]
    for world in plan.worlds:
        if world > MOST_SIMULATED:
            rows += [_extrapolated(plan, text, world, rows) for text in plan.all_schemes]
    return _beside_others(rows)


def _row(plan: Plan, text: str, world: int, over: Network, advance: Advance) -> dict[str, Any]:
    scheme = plan.scheme(text)
    doing = f"{text}, {world:,} ranks"

    def heard(part: float) -> None:
        advance(effort(scheme) * part, f"{doing}: its messages")

    made = recorded(scheme, plan.unit(scheme), world, heard)
    advance(_CALLS * world / 2, f"{doing}: on the network")
    carried = _carried(made, over, plan.way(scheme))
    advance(_CALLS * world / 2, doing)
    units = plan.units(scheme)
    seconds = carried.seconds * units
    row = _timed(plan, text, world, seconds) | {
        "rounds": carried.rounds * units,
        "megabytes_sent": carried.sent * units / 1e6,
        "units": units,
        "simulated_rounds": carried.simulated,
        "recorded_n": made.size.n if made.calls else None,
        "recorded_k": made.size.k if made.calls else None,
        "scaled": made.scaled and bool(made.calls),
    }
    used = over.loads() * units / (over.rates * seconds) if seconds else np.zeros(len(over.links))
    row["busiest_link"] = float(used.max())
    if world == max(plan.simulated):
        row["links"] = {
            name: round(float(share), 5) for name, share in zip(over.links, used, strict=True) if share > 0
        }
        row["number_of_links"] = len(over.links) - over.links.count("__loopback__")
    return row


def _carried(made: Recorded, over: Network, collectives: Collectives) -> Carried:
    total = Carried()
    for call in made.calls:
        total.add(over.carry(call, collectives))
    return total


def _timed(plan: Plan, text: str, world: int, exchange: float) -> dict[str, Any]:
    scheme = plan.scheme(text)
    compute = plan.compute_seconds * (plan.straggler_factor if plan.stragglers else 1.0)
    select = 0.0
    if not (scheme.no_comm or scheme.lossless):
        passes = _OWN + (_SCAN / world if scheme.reads_parts else _SCAN)
        select = passes * _WORD * plan.params / plan.memory_rate
    return {
        "scheme": text,
        "world": world,
        "extrapolated": False,
        "compute_seconds": compute,
        "select_seconds": select,
        "exchange_seconds": exchange,
        "step_seconds": compute + select + exchange,
        "hidden_step_seconds": max(compute + select, exchange),
    }


def _extrapolated(plan: Plan, text: str, world: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    known = [row for row in rows if row["scheme"] == text and not row["extrapolated"]]
    worlds = np.array([row["world"] for row in known], dtype=float)
    law = growth(worlds, np.array([row["exchange_seconds"] for row in known]))
    return _timed(plan, text, world, law.at(world)) | {"extrapolated": True, "fit_error": law.error}


@dataclass(frozen=True, slots=True)
class Law:
    """Seconds at P ranks: a + b log2 P + c P."""

    parts: tuple[float, float, float]
    error: float  # largest relative error on the worlds it was fitted to

    def at(self, world: float) -> float:
        return float(_terms(np.array([world], dtype=float))[0] @ np.array(self.parts))


def _terms(worlds: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([np.ones_like(worlds), np.log2(worlds), worlds], axis=1)


def growth(worlds: NDArray[np.float64], seconds: NDArray[np.float64]) -> Law:
    """The law with the least squares of relative errors, of those without a negative part: time that falls
    where ranks are added would, further out, be less than nothing."""
    if not seconds.any():
        return Law((0.0, 0.0, 0.0), 0.0)
    terms = _terms(worlds) / seconds[:, None]
    best: tuple[float, Law] | None = None
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            found = np.linalg.lstsq(terms[:, chosen], np.ones(len(worlds)), rcond=None)[0]
            if (found < 0).any():
                continue
            parts = [0.0, 0.0, 0.0]
            for place, part in zip(chosen, found, strict=True):
                parts[place] = float(part)
            errors = np.abs(terms @ np.array(parts) - 1)
            squares = float((errors**2).sum())
            if best is None or squares < best[0]:
                best = squares, Law((parts[0], parts[1], parts[2]), float(errors.max()))
    assert best is not None  # one term alone is positive
    return best[1]


def _beside_others(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        same_world = {other["scheme"]: other for other in rows if other["world"] == row["world"]}
        alone, dense = same_world["noop"]["step_seconds"], same_world["dense"]["step_seconds"]
        found.append(
            row
            | {
                "efficiency": alone / row["step_seconds"],
                "hidden_efficiency": alone / row["hidden_step_seconds"],
                "of_dense": row["step_seconds"] / dense,
            }
        )
    return found
