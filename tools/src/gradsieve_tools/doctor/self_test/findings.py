"""What a check says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["ok", "failed", "not possible"]
REPORT = "attach the file of this run to an issue"


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Verdict
    found: str  # a figure, or a reason
    figures: Mapping[str, Any] = field(default_factory=dict)
    fix: str = ""  # what to do, where it failed
    check: str = ""
    seconds: float = 0.0

    def of(self, check: str, seconds: float) -> Finding:
        return replace(self, check=check, seconds=round(seconds, 1))


def failed(found: str, figures: Mapping[str, Any] | None = None, fix: str = REPORT) -> Finding:
    return Finding("failed", found, figures or {}, fix)


def ok(found: str, figures: Mapping[str, Any] | None = None) -> Finding:
    return Finding("ok", found, figures or {})


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"


def exit_code(findings: Sequence[Finding]) -> int:
    return int(any(each.verdict == "failed" for each in findings))
