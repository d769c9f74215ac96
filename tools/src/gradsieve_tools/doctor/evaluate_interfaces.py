"""Rules about who is there, and where each rank's gloo listens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from gradsieve.errors import list_ranks
from gradsieve_tools.doctor.facts import Facts, Interface
from gradsieve_tools.doctor.findings import Finding, Measured, host_of, rate, several_hosts


def missing(facts: Sequence[Facts], world: int) -> Iterator[Finding]:
    gone = tuple(sorted(set(range(world)) - {each.rank for each in facts}))
    if gone:
        what = f"{list_ranks(gone)} of {world} did not report in time"
        yield Finding("error", "missing-rank", gone, what, "look at the output of that rank; is it running?")


def unusable(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Find ranks whose gloo no other host can reach."""
    for each in facts:
        at, why = each.listens_on, _why(each)
        if at is None:
            there = ", ".join(i.name for i in each.interfaces)
            what = f"{each.name}: {why}, and there is no such interface, only {there}"
        elif at.loopback and several_hosts(facts):
            what = f"{each.name}: gloo listens on {at.name}, where other hosts cannot reach it: {why}"
        elif not at.loopback and not (at.up and at.address):
            what = f"{each.name}: {why}, and that is down or has no address"
        else:
            continue
        yield Finding("error", "unusable-interface", (each.rank,), what, _export(_proper(each, facts), each))


def other_network(facts: Sequence[Facts], measured: Measured) -> Iterator[Finding]:
    """A rank that could listen where most do, and listens elsewhere."""
    usual = _usual_network(facts)
    for each in facts:
        at = each.listens_on
        proper = _in_network(each, usual)
        if at is None or proper is None or at.network == usual or at.loopback:
            continue
        used = measured.connections.get(each.rank, {})
        really = ", ".join(f"{count} connections run over {name}" for name, count in sorted(used.items()))
        what = (
            f"{each.name}: gloo listens on {at.name} ({at.address}), the others in {usual}: {_why(each)}"
            f"{'; ' if really else ''}{really}"
        )
        yield Finding("error", "wrong-interface", (each.rank,), what, _export(proper, each))


def unset(facts: Sequence[Facts]) -> Iterator[Finding]:
    """Find hosts whose name leads to the right interface, until /etc/hosts changes."""
    loose = [each for each in facts if not each.asked and len(_usable(each)) > 1]
    if loose and several_hosts(facts):
        ranks = tuple(each.rank for each in loose)
        names = ", ".join(i.name for i in _usable(loose[0]))
        what = f"{list_ranks(ranks)}: GLOO_SOCKET_IFNAME is not set, and there are {names} to choose from"
        yield Finding("note", "unset-interface", ranks, what, _export(_proper(loose[0], facts), loose[0]))


def slower_interface(facts: Sequence[Facts]) -> Iterator[Finding]:
    for each in facts:
        at = each.listens_on
        if at is None or not at.speed or not several_hosts(facts):
            continue
        best = max(_usable(each), key=lambda i: i.speed, default=at)
        if best.speed >= 2 * at.speed:
            speeds = [rate(i.speed) for i in (at, best)]
            what = f"{each.name}: gloo listens on {at.name} at {speeds[0]}; {best.name} has {speeds[1]}"
            yield Finding("warning", "slower-interface", (each.rank,), what, _export(best, each))


def _why(each: Facts) -> str:
    if each.asked:
        return f"GLOO_SOCKET_IFNAME={each.asked}"
    resolved = ", ".join(each.resolved) or "no address"
    return f"GLOO_SOCKET_IFNAME is not set, and {each.hostname} leads to {resolved}"


def _usable(each: Facts) -> list[Interface]:
    return [i for i in each.interfaces if i.up and i.address and not i.loopback]


def _usual_network(facts: Sequence[Facts]) -> str:
    """Return the network on which most ranks listen; of equals, the one towards rank 0."""
    toward = {i.network for each in facts if (i := each.having(each.toward_master)) is not None}
    counts = Counter(i.network for each in facts if (i := each.listens_on) is not None and not i.loopback)
    return max(counts, key=lambda network: (counts[network], network in toward), default="")


def _in_network(each: Facts, network: str) -> Interface | None:
    return next((i for i in _usable(each) if i.network == network), None)


def _proper(each: Facts, facts: Sequence[Facts]) -> Interface | None:
    toward = each.having(each.toward_master)
    usable = _usable(each)
    return (
        _in_network(each, _usual_network(facts))
        or (toward if toward in usable else None)
        or next(iter(usable), None)
    )


def _export(interface: Interface | None, each: Facts) -> str:
    if interface is None:
        return f"bring an interface up on {host_of(each)} that the other hosts can reach"
    return f"export GLOO_SOCKET_IFNAME={interface.name}   # on {host_of(each)}"
