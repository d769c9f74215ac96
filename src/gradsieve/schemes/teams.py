"""How many teams SparDL should form: few rounds or few words, by the links as they are."""

from __future__ import annotations

from collections.abc import Callable


def best_teams(world: int, seconds: Callable[[int], float], powers_of_two: bool) -> int:
    """Returns the number of teams that divides the ranks and is quickest by the cost formula."""
    possible = [d for d in range(1, world + 1) if world % d == 0 and not (powers_of_two and d & (d - 1))]
    return min(possible, key=seconds)
