"""Which pairs are worse than the rest, and whether that is a rank's fault, a pair's, or a place's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Split:
    alone: tuple[int, ...]  # ranks without a good pair
    groups: tuple[tuple[int, ...], ...]  # the other ranks, joined by good pairs; more than one group: sites
    pairs: tuple[Pair, ...]  # pairs inside a group that are not good

    def together(self, one: int, other: int) -> bool:
        return any(one in group and other in group for group in self.groups)


def split(values: Mapping[Pair, float], is_good: Callable[[float], bool]) -> Split:
    """The graph of good pairs taken apart into its components."""
    above = {rank: rank for pair in values for rank in pair}

    def head(rank: int) -> int:
        while above[rank] != rank:
            above[rank] = above[above[rank]]
            rank = above[rank]
        return rank

    good = {pair for pair, value in values.items() if is_good(value)}
    for one, other in good:
        above[head(other)] = head(one)
    members: dict[int, list[int]] = {}
    for rank in sorted(above):
        members.setdefault(head(rank), []).append(rank)
    alone = tuple(group[0] for group in members.values() if len(group) == 1)
    groups = tuple(tuple(group) for group in members.values() if len(group) > 1)
    if not groups:  # no rank is good: there is nothing to be worse than
        return Split((), (tuple(sorted(above)),), ())
    inside = {rank: number for number, group in enumerate(groups) for rank in group}
    bad = [p for p in values if p not in good and p[0] in inside and inside[p[0]] == inside.get(p[1])]
    return Split(alone, groups, tuple(bad))
