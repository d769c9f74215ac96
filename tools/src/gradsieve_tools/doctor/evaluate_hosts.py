"""Rules about hosts and what runs on them: speed, threads, versions, kernels, time-outs, the model."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from gradsieve.errors import list_ranks
from gradsieve_tools.doctor.facts import Facts
from gradsieve_tools.doctor.findings import Finding, Measured, Severity, host_of, span

STRAGGLING = 2.0  # times slower than the median rank
# Seconds for which a stalled rank should be waited for at most; times the dense exchange that a time-out
# must leave; the shortest one that is advised
PATIENT, HASTY, LEAST_TIMEOUT = 600.0, 3.0, 60.0


def straggling(facts: Sequence[Facts], measured: Measured) -> Iterator[Finding]:
    if len(measured.pace) < 2:
        return
    usual = statistics.median(measured.pace.values())
    for rank, pace in sorted(measured.pace.items()):
        if pace * STRAGGLING < usual:
            what = f"{facts[rank].name} computes {usual / pace:.1f} times slower than the median rank"
            fix = f"uptime; cat /sys/fs/cgroup/cpu.stat   # on {host_of(facts[rank])}: other work? a quota?"
            yield Finding("warning", "straggler", (rank,), what, fix)


def threads(facts: Sequence[Facts]) -> Iterator[Finding]:
    for members in _by_host(facts):
        threads, cores = sum(each.threads for each in members), max(each.cores for each in members)
        ranks = tuple(each.rank for each in members)
        proper = max(1, cores // len(members))
        fix = f"export OMP_NUM_THREADS={proper}   # on {host_of(members[0])}"
        what = f"{list_ranks(ranks)} on {host_of(members[0])}: {threads} threads on {cores} processors"
        if threads > cores and threads > len(members):
            yield Finding("warning", "too-many-threads", ranks, what, fix)
        elif threads * 4 <= cores:
            yield Finding("note", "few-threads", ranks, what, fix)


def quota(facts: Sequence[Facts]) -> Iterator[Finding]:
    for each in facts:
        if not 0 < each.quota < each.threads:
            continue
        what = f"{each.name}: {each.threads} threads, and {each.quota:g} processors by its cgroup's quota"
        fix = (
            f"export OMP_NUM_THREADS={int(each.quota)}   # on {host_of(each)}"
            if each.quota >= 1
            else f"raise the quota of {host_of(each)} (--cpus of a container, cpu.max of its cgroup)"
        )
        yield Finding("warning", "quota", (each.rank,), what, fix)


def shared(facts: Sequence[Facts]) -> Iterator[Finding]:
    hosts: dict[str, set[str]] = {}
    for each in facts:
        hosts.setdefault(each.machine, set()).add(each.host)
    for machine, names in hosts.items():
        if len(names) > 1:
            ranks = tuple(each.rank for each in facts if each.machine == machine)
            cores = max(each.cores for each in facts if each.machine == machine)
            what = (
                f"{len(names)} hosts of this group are namespaces of one machine and share its {cores} "
                "processors, as in a lab: what they compute takes longer than on machines of their own"
            )
            yield Finding("note", "one-machine", ranks, what, "nothing, in a lab")


def versions(facts: Sequence[Facts]) -> Iterator[Finding]:
    for name in ("torch", "gradsieve", "python"):
        usual = _most_common([each.versions.get(name, "?") for each in facts])
        others = [each for each in facts if each.versions.get(name, "?") != usual]
        if others:
            found = ", ".join(sorted({each.versions.get(name, "?") for each in others}))
            ranks = tuple(each.rank for each in others)
            what = f"{list_ranks(ranks)}: {name} {found}, the others {usual}"
            fix = f"pip install {name}=={usual}" if name != "python" else f"install Python {usual} there"
            yield Finding("note" if name == "python" else "error", "versions", ranks, what, fix)


def torch_names(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Return what gradsieve reaches of torch beyond its public names, where a torch does not have it."""
    lost: dict[str, list[int]] = {}
    for each in facts:
        for what in each.lacks:
            lost.setdefault(what, []).append(each.rank)
    for what, ranks in lost.items():
        fix = "pip install torch==2.13.0   # a version that gradsieve was tested with: docs/installing.md"
        yield Finding("warning", "torch-names", tuple(ranks), f"{list_ranks(ranks)}: {what}", fix)


def kernels(facts: Sequence[Facts]) -> Iterator[Finding]:
    plain = [each for each in facts if each.kernels != "compiled"]
    if plain:
        ranks = tuple(each.rank for each in plain)
        severity: Severity = "note" if len(plain) == len(facts) else "warning"
        what = f"{list_ranks(ranks)}: torch's kernels instead of compiled ones: {plain[0].kernels}"
        yield Finding(severity, "kernels", ranks, what, "pip install 'gradsieve[cpu]'")


def debugging(facts: Sequence[Facts]) -> Iterator[Finding]:
    slow = [each for each in facts if each.environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"]
    if slow:
        ranks = tuple(each.rank for each in slow)
        what = f"{list_ranks(ranks)}: TORCH_DISTRIBUTED_DEBUG=DETAIL checks every collective by another one"
        yield Finding("warning", "debugging", ranks, what, "unset TORCH_DISTRIBUTED_DEBUG")


def timeout(measured: Measured, world: int, timeout: float) -> Iterator[Finding]:
    needed = dense_seconds(measured, world)
    if world < 2:
        return
    proper = max(LEAST_TIMEOUT, math.ceil(10 * needed / 10) * 10)
    fix = f"init_process_group(timeout=timedelta(seconds={proper:.0f}))"
    if timeout < HASTY * needed:
        what = (
            f"the time-out of {timeout:g} s is short: one dense exchange of the model takes {span(needed)} "
            "over the slowest pair"
        )
        yield Finding("warning", "short-timeout", (), what, fix)
    elif timeout >= max(PATIENT, 2 * proper):
        what = f"a rank that stalls is noticed after {timeout:g} s, the time-out of the group"
        yield Finding("note", "long-timeout", (), what, fix)


def dense_seconds(measured: Measured, world: int) -> float:
    """Return the seconds of a ring all-reduce of the model over the slowest pair; 0: no model is known."""
    slowest = min((bits for row in measured.bandwidth for bits in row if bits), default=0.0)
    if measured.model is None or not slowest:
        return 0.0
    return 2 * (world - 1) / world * 32 * measured.model.parameters / slowest


def conflicts(measured: Measured) -> Iterator[Finding]:
    for conflict in measured.model.conflicts if measured.model is not None else ():
        what, _, fix = conflict.rpartition(": ")
        yield Finding("error", "hook-conflict", (), what or conflict, fix if what else "change the model")


def _by_host(facts: Sequence[Facts]) -> list[list[Facts]]:
    found: dict[str, list[Facts]] = {}
    for each in facts:
        found.setdefault(each.host, []).append(each)
    return list(found.values())


def _most_common(values: Sequence[str]) -> str:
    return Counter(values).most_common(1)[0][0]
