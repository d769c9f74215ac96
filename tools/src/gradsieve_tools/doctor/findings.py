"""What the doctor says, and the figures that it says it from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gradsieve.comm.links import Links
from gradsieve_tools.doctor.facts import Facts
from gradsieve_tools.doctor.model import ModelFigures
from gradsieve_tools.quantities import BITS, SECONDS, spoken

Severity: TypeAlias = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
Matrix: TypeAlias = Sequence[Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    rule: str
    ranks: tuple[int, ...]
    what: str
    fix: str  # A command, or what to do


@dataclass(frozen=True, slots=True)
class Measured:
    """Matrices: row sends, column receives; None where it was not measured."""

    latency: Matrix = ()
    bandwidth: Matrix = ()
    failed: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    pace: Mapping[int, float] = field(default_factory=dict)
    # gloo's connections by the interface they use
    connections: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)  # errors of ranks that could not measure
    ring: Links | None = None  # a sum over all ranks
    model: ModelFigures | None = None


def sorted_by_severity(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def exit_code(findings: Sequence[Finding]) -> int:
    return int(any(finding.severity != "note" for finding in findings))


def several_hosts(facts: Sequence[Facts]) -> bool:
    return len({each.host for each in facts}) > 1


def host_of(each: Facts) -> str:
    return each.alias or each.hostname


def address_of(each: Facts) -> str:
    return at.address if (at := each.listens_on) is not None else host_of(each)


def rate(bits: float) -> str:
    return spoken(bits, BITS, 3)


def span(seconds: float) -> str:
    return spoken(seconds, SECONDS, 3)
