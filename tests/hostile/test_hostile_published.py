"""Messages that only published rules have (DEFT's leader, sizes): forged ones are refused or harmless."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.errors import Malformed
from gradsieve.testing.laws import check_indices, check_replicated
from hostile.evil import EVIL, N, Target, bits_of, same_message, target
from laws.cases import published

COUNTED_AT = {"exdyna-paper": [0], "micro-paper": [0], "deft-paper": [1, 2], "oktopk-paper": [0, 1, 3]}
"""Messages that say how long another one will be: a liar who keeps to what was said is another matter."""
FROM_RANK_TO_RANK = {"spardl-paper"}
"""Its messages go to one rank each. Who passes on another value cannot be found out by a rank alone: the
pipeline's checksum finds it (ADR 28, test_ledger.py)."""
every_scheme = pytest.mark.parametrize("name", published())


@cache
def victim(name: str, steps: int) -> Target:
    """Attacks change nothing, so that one target serves them all. DEFT listens to its leader."""
    goal = target(name, steps)
    return replace(goal, evil=steps % 3) if name == "deft-paper" else goal


@every_scheme
@given(
    place=st.integers(0, 500),
    value=st.sampled_from([0, 1, -1, N - 1, N, N + 1, 2**31 - 1, -(2**31), bits_of(torch.nan)]),
    when=st.integers(0, 5),
    steps=st.sampled_from([0, 3]),
)
def test_a_word_changed_in_any_message_is_refused_or_harmless(
    name: str, place: int, value: int, when: int, steps: int
) -> None:
    def forge(turn: int, message: Tensor) -> Tensor:
        if turn == when and turn not in COUNTED_AT.get(name, []) and message.numel():
            message.view(-1)[place % message.numel()] = value
        return message

    try:
        outcomes = victim(name, steps).attack(forge)
    except Malformed:
        return
    if name not in FROM_RANK_TO_RANK:
        check_replicated(outcomes)
    for outcome in outcomes:
        check_indices(outcome.update, N)


@every_scheme
@pytest.mark.parametrize("steps", [0, 3])
def test_the_same_messages_unforged_are_accepted(name: str, steps: int) -> None:
    outcomes = victim(name, steps).attack(same_message)
    check_replicated(outcomes)
    check_indices(outcomes[0].update, N)


@pytest.mark.parametrize("count", [-1, N + 1, 2**31 - 1])
@pytest.mark.parametrize(
    ("name", "when", "what"),
    [
        ("micro-paper", 0, "elements"),
        ("deft-paper", 2, "elements"),
        ("oktopk-paper", 0, "elements"),
        ("oktopk-paper", 3, "sums"),
    ],
)
def test_impossible_counts_are_refused_and_the_liar_named(
    name: str, when: int, what: str, count: int
) -> None:
    def forge(turn: int, message: Tensor) -> Tensor:
        if turn == when:
            message.view(-1)[0] = count
        return message

    with pytest.raises(Malformed, match=rf"rank {EVIL} announced {count} {what} in step 4"):
        replace(victim(name, 4), evil=EVIL).attack(forge)


def same_layer_twice(layers: Tensor) -> None:
    layers[1] = layers[0]


def no_such_layer(layers: Tensor) -> None:
    layers[0] = 7


def negative_layer(layers: Tensor) -> None:
    layers[0] = -1


FORGERIES = [same_layer_twice, no_such_layer, negative_layer]


def leading(when: int, change: Callable[[Tensor], None]) -> Callable[[int, Tensor], Tensor]:
    def forge(turn: int, message: Tensor) -> Tensor:
        if turn == when:
            change(message)
        return message

    return forge


@pytest.mark.parametrize("change", FORGERIES)
def test_layers_of_defts_leader_are_each_there_once(change: Callable[[Tensor], None]) -> None:
    with pytest.raises(Malformed, match="layers in step 3 of the leader, rank 0, are not each"):
        victim("deft-paper", 3).attack(leading(1, change))


@pytest.mark.parametrize("lengths", [[-1, 1, 1], [4, 0, 0], [2, 2, 2], [2**31 - 1, 0, 0]])
def test_bins_of_defts_leader_hold_no_more_than_there_is(lengths: list[int]) -> None:
    def change(message: Tensor) -> None:
        message.copy_(torch.tensor(lengths))

    with pytest.raises(Malformed, match="layers in step 3 of the leader, rank 0, are not each"):
        victim("deft-paper", 3).attack(leading(0, change))
