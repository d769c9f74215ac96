"""Figures in, findings out. No clock, no socket: each rule is a function that a test can call.

error     training will hang, fail, or run over the wrong network
warning   it will be slower than these hosts could be
note      worth knowing; nothing is wrong
"""

from __future__ import annotations

from collections.abc import Sequence

from gradsieve_tools.doctor import evaluate_hosts as hosts
from gradsieve_tools.doctor import evaluate_interfaces as interfaces
from gradsieve_tools.doctor import evaluate_links as links
from gradsieve_tools.doctor.facts import Facts
from gradsieve_tools.doctor.findings import Finding, Measured, sorted_by_severity

TORCH_TIMEOUT = 1800.0  # seconds; torch's default


def before(facts: Sequence[Facts], world: int) -> list[Finding]:
    """Return what keeps the group from being made: with an error among it, nothing can be measured."""
    return sorted_by_severity([*interfaces.missing(facts, world), *interfaces.unusable(facts)])


def after(facts: Sequence[Facts], measured: Measured, timeout: float | None) -> list[Finding]:
    elsewhere = list(interfaces.other_network(facts, measured))
    explained = {rank for finding in elsewhere for rank in finding.ranks}
    rules = [
        links.failed(facts, measured),
        elsewhere,
        interfaces.unset(facts),
        interfaces.slower_interface(facts),
        links.slow(facts, measured, explained),
        links.far(facts, measured),
        hosts.straggling(facts, measured),
        hosts.threads(facts),
        hosts.quota(facts),
        hosts.shared(facts),
        hosts.versions(facts),
        hosts.torch_names(facts),
        hosts.kernels(facts),
        hosts.debugging(facts),
        hosts.timeout(measured, len(facts), TORCH_TIMEOUT if timeout is None else timeout),
        hosts.conflicts(measured),
    ]
    return sorted_by_severity([finding for rule in rules for finding in rule])
