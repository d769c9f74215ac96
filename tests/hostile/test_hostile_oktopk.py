"""Ok-Topk under fire: sizes and rows to the owners of regions, sizes and rows to everybody.

Its messages in a step of three ranks: 0 the size for the next rank, 1 for the one after it, 2 rows to the
owners, 3 how many sums this rank offers and how many elements it received, then the sums, in one message or,
balanced, in two. (A lie about the cuts of regions
only moves them: `test_a_lie_about_cuts_leaves_regions_in_order`.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.ops import AllToAll, Exchange
from gradsieve.errors import Malformed
from gradsieve.testing.laws import check_indices, check_replicated
from gradsieve.types import Ctx, Program
from hostile.evil import EVIL, WORLD, Forgery, N, Target, bits_of, same_message, target
from hostile.test_hostile_messages import FORGERIES

STEPS = [0, 3, 4]
"""Exact, and following a threshold."""
every_step = pytest.mark.parametrize("steps", STEPS)


def to_owners(forgery: str) -> Forgery:
    """Alters the indices that go to rank 0."""
    count = 0

    def forge(turn: int, message: Tensor) -> Tensor:
        nonlocal count
        if turn == 1:
            count = int(message[0])
        if turn == 2:
            assert count >= 3, "there must be something to forge"
            FORGERIES[forgery](message[:count, 0])
        return message

    return forge


def to_everybody(forgery: str) -> Forgery:
    """Alters the first indices of what this rank gathers."""

    def forge(turn: int, message: Tensor) -> Tensor:
        if turn > 3:
            FORGERIES[forgery](message[:3, 0])
        return message

    return forge


@every_step
@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_indices_to_an_owner_are_refused_and_the_liar_named(steps: int, forgery: str) -> None:
    with pytest.raises(Malformed, match=rf"indices in step {steps} of rank {EVIL} are not sorted, unique"):
        target("oktopk", steps).attack(to_owners(forgery))


def of_another_step(turn: int, message: Tensor) -> Tensor:
    """The right count, in a message as the next step's."""
    if turn == 1:
        message[1] += WORLD * WORLD
    return message


@every_step
def test_a_count_of_another_step_is_refused_and_its_rank_named(steps: int) -> None:
    said = rf"rank {EVIL} announced elements in step {steps} in a stale or misrouted message"
    with pytest.raises(Malformed, match=said):
        target("oktopk", steps).attack(of_another_step)


@every_step
@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_indices_of_sums_are_refused(steps: int, forgery: str) -> None:
    with pytest.raises(Malformed, match=rf"indices gathered in step {steps} are not sorted, unique"):
        target("oktopk", steps).attack(to_everybody(forgery))


@every_step
def test_the_same_messages_unforged_are_accepted(steps: int) -> None:
    outcomes = target("oktopk", steps).attack(same_message)
    check_replicated(outcomes)
    check_indices(outcomes[0].update, N)


@every_step
@pytest.mark.parametrize("count", [-1, -(2**31), N + 1, 2**31 - 1])
@pytest.mark.parametrize(
    ("message", "place", "what"), [(0, 0, "elements"), (3, 0, "sums"), (3, 1, "elements received")]
)
def test_impossible_sizes_are_refused_and_the_liar_named(
    steps: int, count: int, message: int, place: int, what: str
) -> None:
    def forge(turn: int, words: Tensor) -> Tensor:
        if turn == message:
            words[place] = count
        return words

    with pytest.raises(Malformed, match=rf"rank {EVIL} announced {count} {what} in step {steps}"):
        target("oktopk", steps).attack(forge)


def padding(program: Program[Any], counts: list[int], row: tuple[int, int]) -> Program[Any]:
    """The same program, but as many rows to the honest owners as `counts` says, announced as such."""
    reply: Any = None
    announced = False
    while True:
        try:
            op = program.send(reply)
        except StopIteration as end:
            return end.value
        if isinstance(op, Exchange):  # among three ranks, a size goes straight to its owner
            op = replace(op, tensor=torch.full_like(op.tensor, counts[op.to]))
        elif isinstance(op, AllToAll) and not announced:
            parts = list(op.tensor.split(list(op.send_counts)))
            for rank in {*range(WORLD)} - {EVIL}:
                filler = torch.tensor([row] * counts[rank], dtype=op.tensor.dtype).view(-1, 2)
                parts[rank] = torch.cat([parts[rank], filler])[: counts[rank]]
            op = replace(op, tensor=torch.cat(parts), send_counts=tuple(map(len, parts)))
            announced = True
        reply = yield op


@given(
    counts=st.lists(st.integers(0, 60), min_size=WORLD, max_size=WORLD),
    row=st.tuples(st.integers(-2, N + 2), st.sampled_from([0, bits_of(1e38), bits_of(torch.nan)])),
    steps=st.sampled_from(STEPS),
)
def test_a_peer_that_keeps_to_its_false_sizes_is_refused_or_harmless(
    counts: list[int], row: tuple[int, int], steps: int
) -> None:
    goal = target("oktopk", steps)
    programs = [
        goal.scheme.exchange(acc, state, Ctx(rank, WORLD, steps))
        for rank, (acc, state) in enumerate(zip(goal.accs, goal.states, strict=True))
    ]
    programs[EVIL] = padding(programs[EVIL], counts, row)
    try:
        outcomes = lockstep.run(programs)
    except Malformed:
        return
    check_replicated(outcomes)
    check_indices(outcomes[0].update, N)


@pytest.mark.parametrize("threshold", [1e-3, 1e3])
def test_an_owner_that_offers_all_or_nothing_gets_no_more_than_its_share(threshold: float) -> None:
    goal = target("oktopk", 3)
    goal.states[EVIL] = replace(goal.states[EVIL], global_threshold=threshold)
    liar = Target(goal.scheme, goal.accs, goal.states, goal.step)
    outcomes = liar.attack(same_message)
    check_replicated(outcomes)
    check_indices(outcomes[0].update, N)
    assert outcomes[0].update.count <= goal.scheme.k(N)
