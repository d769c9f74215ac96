"""Whether something grows: of many looks at a rank, those after the warm-up, a straight line through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

WARM_UP = 0.25  # share of the steps in which pools, caches and tables may fill
# What is looked at, and how much more of it there may be at the end than after the warm-up. Memory: what an
# allocator keeps for itself moves by some hundred kB. Objects are those that Python's collector knows.
MEASURES = {"memory_kb": 1024.0, "objects": 50.0, "files": 0.0, "threads": 0.0}
FEWEST = 8  # readings after the warm-up that a verdict needs


@dataclass(frozen=True, slots=True)
class Look:
    step: int
    memory_kb: float  # resident
    objects: float
    files: float
    threads: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    scheme: str
    rank: int
    measure: str
    # After the warm-up: the median of the first quarter of the looks; `last` that of the last one
    first: float
    last: float
    slope: float  # a 1,000 steps
    allowed: float
    verdict: str  # `flat`, or what is wrong

    @property
    def is_good(self) -> bool:
        return self.verdict == "flat"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def verdict_of(scheme: str, rank: int, looks: Sequence[Look], steps: int) -> list[Line]:
    late = [look for look in looks if look.step >= WARM_UP * steps]
    if len(late) < FEWEST or late[-1].step != steps:
        at = looks[-1].step if looks else 0
        said = f"{len(late)} looks after the warm-up, the last after step {at} of {steps}: no verdict"
        return [
            Line(scheme=scheme, rank=rank, measure="all", first=0, last=0, slope=0, allowed=0, verdict=said)
        ]
    return [_line(scheme, rank, late, measure) for measure in MEASURES]


def _line(scheme: str, rank: int, late: Sequence[Look], measure: str) -> Line:
    values = [float(getattr(look, measure)) for look in late]
    quarter = len(values) // 4
    first, last = median(values[:quarter]), median(values[-quarter:])
    slope = _slope([look.step for look in late], values)
    # By the line, which one look cannot bend; and by the ends, where growth began late or came at once.
    grown = max(slope * (late[-1].step - late[0].step), last - first)
    allowed = MEASURES[measure]
    return Line(
        scheme=scheme,
        rank=rank,
        measure=measure,
        first=first,
        last=last,
        slope=round(1000 * slope, 4),
        allowed=allowed,
        verdict="flat" if grown <= allowed else f"grew by {grown:,.1f}",
    )


def _slope(steps: Sequence[int], values: Sequence[float]) -> float:
    """The median over all pairs of looks (Theil and Sen): a quarter of them may be far off."""
    pairs = range(len(steps))
    return median(
        (values[late] - values[early]) / (steps[late] - steps[early])
        for late in pairs
        for early in range(late)
    )
