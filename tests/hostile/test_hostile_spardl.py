"""SparDL's messages: pairs of index and value bits, block by block; holes are lawful, wrong order is not."""

from __future__ import annotations

import pytest
from torch import Tensor

from gradsieve.errors import Malformed
from gradsieve.testing.laws import check_indices, check_replicated
from hostile.evil import Forgery, N, same_message, target

TURNS = [0, 1, 2]
"""Two rounds of the reduce-scatter among three, then the first of the all-gather."""


def swapped(indices: Tensor) -> None:
    indices[[0, 1]] = indices[[1, 0]]


def doubled(indices: Tensor) -> None:
    indices[1] = indices[0]


def negative(indices: Tensor) -> None:
    indices[0] = -1


def beyond(indices: Tensor) -> None:
    indices[2] = N + 1


def far_beyond(indices: Tensor) -> None:
    indices[-1] = 2**31 - 1


FORGERIES = {f.__name__: f for f in (swapped, doubled, negative, beyond, far_beyond)}


def forged(change: str, when: int) -> Forgery:
    def forge(turn: int, message: Tensor) -> Tensor:
        if turn == when:
            FORGERIES[change](message.view(-1, 2)[:, 0])
        return message

    return forge


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("change", FORGERIES)
def test_forged_places_are_refused_in_every_round(change: str, turn: int) -> None:
    with pytest.raises(Malformed, match="not sorted, unique and inside"):
        target("spardl", 3).attack(forged(change, turn))


def test_the_same_messages_unforged_are_accepted() -> None:
    outcomes = target("spardl", 3).attack(same_message)
    check_replicated(outcomes)
    check_indices(outcomes[0].update, N)
