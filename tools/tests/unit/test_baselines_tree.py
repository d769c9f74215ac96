"""gTop-k, CLT-k, top-k over the union and random-k: worked by hand, counted, and lied to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.ops import Meter
from gradsieve.errors import Malformed
from gradsieve.schemes import make
from gradsieve.schemes.base import Scheme, log2_ceil
from gradsieve.schemes.baselines.randomk import turn
from gradsieve.schemes.baselines.topk_union import Seen, TopKUnion
from gradsieve.types import Ctx, Outcome, Sparse
from gradsieve_tools import formulas
from gradsieve_tools.baselines.cltk import CltK
from gradsieve_tools.baselines.gtopk import GTopK
from hostile.evil import lying

CPU = torch.device("cpu")


def exchanged(
    scheme: Scheme[Any], accs: list[Tensor], step: int = 0, meters: list[Meter] | None = None
) -> list[Outcome[Any]]:
    n, world = accs[0].numel(), len(accs)
    programs = [
        scheme.exchange(acc, scheme.begin(n, world), Ctx(rank, world, step)) for rank, acc in enumerate(accs)
    ]
    return lockstep.run(programs, meters)


def vectors(n: int, *entries: dict[int, float]) -> list[Tensor]:
    """One vector a rank with these elements."""
    accs = [torch.zeros(n) for _ in entries]
    for acc, own in zip(accs, entries, strict=True):
        for index, value in own.items():
            acc[index] = value
    return accs


def elements(part: Sparse) -> dict[int, float]:
    """The elements of a vector that are not zero."""
    assert part.indices is not None
    return {
        index: value
        for index, value in zip(part.indices.tolist(), part.values.tolist(), strict=True)
        if value
    }


def normal(n: int, world: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(world)
    return [torch.randn(n, generator=source) for _ in range(world)]


@pytest.mark.parametrize("name", ["gtopk", "cltk", "topk-union", "randomk"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8, 13])
@pytest.mark.parametrize("step", [0, 5])
def test_the_busiest_rank_moves_exactly_what_the_formula_says(name: str, world: int, step: int) -> None:
    n, scheme, meters = 1000, make(name, 0.05), [Meter(rank, world) for rank in range(world)]
    outcomes = exchanged(scheme, normal(n, world), step, meters)
    words = formulas.words(scheme, n, world, outcomes[0].state)
    assert max(meter.moved for meter in meters) / 4 == pytest.approx(words)
    saved = log2_ceil(world) if name == "topk-union" else 0  # the published gather of counts
    assert max(meter.rounds for meter in meters) == formulas.rounds(scheme, n, world) - saved


# -- gTop-k -------------------------------------------------------------------------------------------

BRANCHES = [{0: 9, 1: 8}, {2: 3, 3: 2}, {2: 20, 4: 1}, {2: 5, 5: 6}]
"""Rank 0 drops index 2 of rank 1; it comes through from ranks 2 and 3."""


def test_gtopk_takes_back_where_it_was_dropped_what_came_through_elsewhere() -> None:
    outcomes = exchanged(GTopK(density=0.25), vectors(8, *BRANCHES))
    assert elements(outcomes[3].update) == {0: 9, 2: 25}
    assert [elements(out.spent) for out in outcomes] == [{0: 9, 2: -3}, {2: 3}, {2: 20}, {2: 5}]


def test_gtopk_as_published_loses_what_was_dropped() -> None:
    outcomes = exchanged(GTopK(density=0.25, paper=True), vectors(8, *BRANCHES))
    assert elements(outcomes[3].update) == {0: 9, 2: 25}
    assert [elements(out.spent) for out in outcomes] == [{0: 9}, {2: 3}, {2: 20}, {2: 5}]


@pytest.mark.parametrize(("liar", "turn_of_its_message"), [(1, 0), (2, 1), (3, 0), (4, 2), (6, 1), (0, 3)])
def test_gtopk_refuses_a_forged_message_on_every_level_of_the_tree(
    liar: int, turn_of_its_message: int
) -> None:
    """Rank 0 lies in the broadcast, the others on their way up."""
    scheme, world, accs = GTopK(density=0.1), 7, normal(100, 7)

    def forge(turn: int, message: Tensor) -> Tensor:
        if turn == turn_of_its_message:
            message[1] = message[0]
        return message

    programs = [scheme.exchange(acc, scheme.begin(100, 7), Ctx(r, world, 4)) for r, acc in enumerate(accs)]
    programs[liar] = lying(programs[liar], forge)
    with pytest.raises(Malformed, match=rf"in step 4 of (the root, )?rank {liar} are not sorted, unique"):
        lockstep.run(programs)


# -- random-k -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (2, 1), (7, 3), (8, 8), (60, 7), (97, 10), (128, 32), (210, 209)]
)
def test_randomk_gives_every_element_one_turn_in_every_cycle(n: int, k: int) -> None:
    steps = -(-n // k)
    for cycle in range(4):
        turns = [turn(n, k, cycle * steps + place, CPU) for place in range(steps)]
        assert all(picked.numel() == k for picked in turns[:-1])
        assert all(bool((picked[1:] > picked[:-1]).all()) for picked in turns)
        assert torch.cat(turns).sort().values.tolist() == list(range(n))


@pytest.mark.parametrize("n", [2**31, 2**40 + 1, 2**61 - 1])
@pytest.mark.parametrize("step", [0, 1, 10**6, 10**12])
def test_randomk_does_not_overflow(n: int, step: int) -> None:
    """Elements stay evenly spaced modulo n: moved by the distance of two neighbours, all but one coincide."""
    picked = turn(n, 64, step, CPU).tolist()
    assert all(0 <= index < n for index in picked)
    moved = [{(index + other - picked[0]) % n for index in picked} for other in picked[1:]]
    assert max(len(places & set(picked)) for places in moved) == 63


def test_cltk_sends_everywhere_what_is_largest_on_the_leader() -> None:
    accs = vectors(8, {0: 9, 3: 1}, {3: 5, 6: -4, 7: 2}, {0: 7, 6: 1})
    outcomes = exchanged(CltK(density=0.25), accs, step=4)
    assert elements(outcomes[0].update) == {3: 6, 6: -3}
    assert [elements(out.spent) for out in outcomes] == [{3: 1}, {3: 5, 6: -4}, {6: 1}]


def test_topk_union_sends_on_every_rank_what_any_rank_chose() -> None:
    accs = vectors(8, {0: 9, 3: -8, 5: 1}, {3: 2, 0: 1}, {5: 4})
    outcomes = exchanged(TopKUnion(density=0.25), accs)
    assert elements(outcomes[2].update) == {0: 10, 3: -6, 5: 5}
    assert [elements(out.spent) for out in outcomes] == [{0: 9, 3: -8, 5: 1}, {0: 1, 3: 2}, {5: 4}]
    assert outcomes[1].state == Seen(longest=2, mean=5 / 3, union=3)
    assert TopKUnion().report(outcomes[1].state) == {"imbalance": pytest.approx(1.2)}
