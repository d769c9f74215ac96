"""Rules about the network between ranks: who cannot talk, whose link is slow, who is far away."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from gradsieve.errors import list_ranks
from gradsieve_tools.doctor.facts import Facts
from gradsieve_tools.doctor.findings import Finding, Matrix, Measured, address_of, host_of, rate, span
from gradsieve_tools.doctor.groups import split

SLOW = 3.0  # times less bandwidth than a rank's best is elsewhere
FAR, FAR_SECONDS = 5.0, 2e-3  # times the latency, and seconds more, that make a rank far away
_MOST_PAIRS = 4


def failed(facts: Sequence[Facts], measured: Measured) -> Iterator[Finding]:
    names = {each.rank: each.name for each in facts}
    for rank, cause in sorted(measured.errors.items()):
        what = f"{names.get(rank, f'rank {rank}')} could not measure: {cause}"
        fix = "open the hosts' ports to each other, and name the right interface in GLOO_SOCKET_IFNAME"
        yield Finding("error", "no-connection", (rank,), what, fix)
    seen = set()
    for rank, partners in sorted(measured.failed.items()):
        for other, cause in sorted(partners.items()):
            pair = (min(rank, other), max(rank, other))
            if pair not in seen:
                seen.add(pair)
                what = f"{names[pair[0]]} and {names[pair[1]]} got no message through: {cause}"
                fix = "ping each from the other; open the ports between them"
                yield Finding("error", "no-connection", pair, what, fix)


def slow(facts: Sequence[Facts], measured: Measured, explained: Set[int] = frozenset()) -> Iterator[Finding]:
    """Compare the slower direction of each pair with what most ranks have at best, on one network alone."""
    between = _between_hosts(facts, measured.bandwidth, min)
    both = {pair: bits for pair, bits in between.items() if explained.isdisjoint(pair)}
    best = _best(both, max)
    if not best:
        return
    usual = statistics.median(best.values())
    found = split(both, lambda bits: bits >= usual / SLOW)
    for rank in found.alone:
        own = statistics.median(bits for pair, bits in both.items() if rank in pair)
        what = f"{facts[rank].name} has {rate(own)} with the others, and they {rate(usual)} among themselves"
        yield Finding("warning", "slow-link", (rank,), what, _look_at(facts[rank]))
    if len(found.groups) > 1:
        across = [bits for pair, bits in both.items() if not found.together(*pair)]
        what = (
            f"{len(found.groups)} groups with {rate(usual)} within and {rate(statistics.median(across))} "
            f"between: {'; '.join(list_ranks(group) for group in found.groups)}"
        )
        fix = "nothing, if these are sites: expect the slower figure, or train with every=H"
        yield Finding("note", "sites", (), what, fix)
    for pair in sorted(found.pairs, key=lambda pair: both[pair])[:_MOST_PAIRS]:
        more = f"; {len(found.pairs)} such pairs" if len(found.pairs) > 1 else ""
        what = (
            f"{facts[pair[0]].name} and {facts[pair[1]].name}: {rate(both[pair])} between them, with others "
            f"{rate(min(best[rank] for rank in pair))}{more}"
        )
        fix = f"look at their way: tracepath {address_of(facts[pair[1]])}   # on {host_of(facts[pair[0]])}"
        yield Finding("warning", "slow-pair", pair, what, fix)


def far(facts: Sequence[Facts], measured: Measured) -> Iterator[Finding]:
    both = _between_hosts(facts, measured.latency, max)
    best = _best(both, min)
    if not best:
        return
    usual = statistics.median(best.values())
    found = split(both, lambda seconds: seconds <= max(FAR * usual, usual + FAR_SECONDS))
    for rank in found.alone:
        what = (
            f"{facts[rank].name} is {span(best[rank])} away from the nearest other host; others are "
            f"{span(usual)}"
        )
        fix = f"place it nearer, or expect this for every round: tracepath {address_of(facts[rank])}"
        yield Finding("warning", "far-rank", (rank,), what, fix)


def _between_hosts(
    facts: Sequence[Facts], matrix: Matrix, worse: Callable[[float, float], float]
) -> dict[tuple[int, int], float]:
    """The worse direction of each pair on different hosts that was measured."""
    found = {}
    for i, row in enumerate(matrix):
        for j in range(i + 1, len(matrix)):
            there, back = row[j], matrix[j][i]
            if there is not None and back is not None and facts[i].host != facts[j].host:
                found[i, j] = worse(there, back)
    return found


def _best(both: Mapping[tuple[int, int], float], better: Callable[[float, float], float]) -> dict[int, float]:
    """Return each rank's best figure with any other."""
    best: dict[int, float] = {}
    for pair, value in both.items():
        for rank in pair:
            best[rank] = better(best.get(rank, value), value)
    return best


def _look_at(each: Facts) -> str:
    device = at.name if (at := each.listens_on) is not None else "eth0"
    return f"ethtool {device}; ip -s link show {device}   # on {host_of(each)}: speed, errors; cable, port"
