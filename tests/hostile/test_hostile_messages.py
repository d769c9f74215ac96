"""A peer's message with impossible indices or counts is refused before anything of it is applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gradsieve.errors import Malformed
from gradsieve.schemes.exclusive import HEADER
from gradsieve.testing.laws import check_indices, check_replicated
from gradsieve.wire.check import inside_its_partition
from hostile.evil import COUNTS_FIRST, EVIL, Forgery, N, bits_of, same_message, target

STEPS = [0, 3, 4, 5]
"""Looking for a threshold; then tracking it, with each rank at another partition."""
GATHERING = ["topk", "topk-union", "gtopk", "cltk", "deft", *COUNTS_FIRST]
PACKED = ["micro", "exdyna"]
"""Their rows are bytes, in which most forgeries of plain indices cannot be written."""
every_scheme = pytest.mark.parametrize("name", GATHERING)
every_step = pytest.mark.parametrize("steps", STEPS)


def forged_indices(name: str, change: Callable[[Tensor], None]) -> Forgery:
    """Alters the indices in the message, in place, and nothing else."""
    count = 0

    def forge(turn: int, message: Tensor) -> Tensor:
        nonlocal count
        if name in COUNTS_FIRST and turn == 0:
            count = int(message)
            return message
        if turn and name == "gtopk":
            return message  # it has handed over its entries
        if name in ("gtopk", "cltk", "topk-union", "deft"):
            row = message.chunk(2)[0] if name == "gtopk" else message
            live, start = row[row < N], 0
        elif name in ("topk", "gaussiank", "sidco", "dgc"):
            live = message[0][message[0] < N]
            start, row = 0, message[0]
        else:
            live, start, row = message[:count], 0, message
        assert live.numel() >= 3, "there must be something to forge"
        change(live := live.clone())
        row[start : start + live.numel()] = live
        return message

    return forge


def set_at(place: int, value: int) -> Callable[[Tensor], None]:
    def change(live: Tensor) -> None:
        live[place] = value

    return change


def unsorted(live: Tensor) -> None:
    live.copy_(live.flip(0))


def duplicate(live: Tensor) -> None:
    live[1] = live[0]


def all_alike(live: Tensor) -> None:
    live.fill_(int(live[0]))


FORGERIES = {
    "negative": set_at(0, -1),
    "very negative": set_at(0, -(2**31)),
    "negative in the middle": set_at(1, -5),
    "one beyond the end": set_at(-1, N + 1),
    "far beyond the end": set_at(-1, 2**31 - 1),
    "beyond the end in the middle": set_at(1, N + 7),
    "filler in the middle": set_at(1, N),
    "unsorted": unsorted,
    "duplicate": duplicate,
    "all alike": all_alike,
}


@every_scheme
@every_step
@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_indices_are_refused_before_anything_is_applied(name: str, steps: int, forgery: str) -> None:
    with pytest.raises(Malformed, match="not sorted, unique and inside"):
        target(name, steps).attack(forged_indices(name, FORGERIES[forgery]))


@pytest.mark.parametrize("name", [*GATHERING, *PACKED])
@every_step
def test_the_same_message_unforged_is_accepted(name: str, steps: int) -> None:
    """The twin: what is refused above is refused for the forgery and for nothing else."""
    outcomes = target(name, steps).attack(same_message)
    check_replicated(outcomes)
    check_indices(outcomes[0].update, N)


def forged_count(name: str, count: int) -> Forgery:
    def forge(turn: int, message: Tensor) -> Tensor:
        if turn == 0:
            numbers = message[:8].view(torch.int64) if name in PACKED else message
            numbers[0] = count
        return message

    return forge


@pytest.mark.parametrize("name", ["micro", "exdyna", *COUNTS_FIRST])
@every_step
@pytest.mark.parametrize("count", [-1, -(2**31), N + 1, 2**31 - 1])
def test_impossible_counts_are_refused_and_the_liar_named(name: str, steps: int, count: int) -> None:
    with pytest.raises(Malformed, match=rf"rank {EVIL} announced {count} elements in step {steps}"):
        target(name, steps).attack(forged_count(name, count))


def test_a_count_that_would_need_the_memory_of_a_city_is_refused() -> None:
    with pytest.raises(Malformed, match=rf"rank {EVIL} announced {2**62}"):
        target("exdyna-paper", 3).attack(forged_count("exdyna-paper", 2**62))


def packed(change: Callable[[Tensor], None]) -> Forgery:
    """Alters the bytes of a packed row behind its header."""

    def forge(turn: int, message: Tensor) -> Tensor:
        if turn == 0:
            change(message[HEADER:])
        return message

    return forge


@pytest.mark.parametrize("name", PACKED)
@every_step
def test_more_or_fewer_indices_than_announced_are_refused_and_the_liar_named(name: str, steps: int) -> None:
    with pytest.raises(Malformed, match=rf"rank {EVIL} sent another number of indices than it announced"):
        target(name, steps).attack(packed(lambda payload: payload.fill_(0)))
    with pytest.raises(Malformed, match=rf"rank {EVIL} sent another number of indices than it announced"):
        target(name, steps).attack(packed(lambda payload: payload.fill_(255)))


@pytest.mark.parametrize("name", PACKED)
@every_step
@pytest.mark.parametrize("tail", [-1.0, -1e38, float("nan"), float("inf"), -float("inf")])
def test_an_impossible_tail_is_refused_and_the_liar_named(name: str, steps: int, tail: float) -> None:
    def forge(turn: int, message: Tensor) -> Tensor:
        message[8:HEADER] = torch.tensor([tail]).view(torch.uint8)
        return message

    with pytest.raises(Malformed, match=rf"rank {EVIL} sent a threshold statistic of"):
        target(name, steps).attack(forge)


def test_an_index_beyond_the_senders_own_partition_is_refused() -> None:
    """Rows are laid for the longest partition; in a shorter one they could name a neighbour's element."""
    places, spans, ranks = np.array([3, 9, 4]), np.array([10, 10, 4]), np.array([0, 0, 2])
    with pytest.raises(Malformed, match="rank 2 sent index 4 in step 3 of a partition that has 4"):
        inside_its_partition(places, spans, ranks, "in step 3")
    inside_its_partition(places[:2], spans[:2], ranks[:2], "in step 3")


@every_step
def test_a_topk_row_that_is_refused_names_its_sender(steps: int) -> None:
    with pytest.raises(Malformed, match=rf"indices in step {steps} of rank {EVIL} are not sorted"):
        target("topk", steps).attack(forged_indices("topk", duplicate))


@every_step
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_root_of_gtopk_that_broadcasts_forged_indices_is_refused(steps: int, forgery: str) -> None:
    def forge(turn: int, message: Tensor) -> Tensor:
        return forged_indices("gtopk", FORGERIES[forgery])(0, message) if turn == 2 else message

    with pytest.raises(Malformed, match=rf"indices in step {steps} of the root, rank 0 are not sorted"):
        replace(target("gtopk", steps), evil=0).attack(forge)


@every_step
@pytest.mark.parametrize(
    ("name", "sender"),
    [
        ("gtopk", "rank {}"),
        ("cltk", "the leader, rank {}"),
        ("topk-union", "rank {}"),
        ("hard-threshold", "rank {}"),
        ("gaussiank", "rank {}"),
    ],
)
def test_a_row_that_is_refused_names_its_sender(name: str, sender: str, steps: int) -> None:
    goal = target(name, steps)
    with pytest.raises(Malformed, match=rf"indices in step {steps} of {sender.format(goal.evil)} are not"):
        goal.attack(forged_indices(name, duplicate))


def test_forged_values_stay_a_lie_of_the_liar_alone() -> None:
    """Values are not checked here (the pipeline votes on finiteness): indices stay lawful, replicas equal."""

    def forge(turn: int, message: Tensor) -> Tensor:
        message[1, :] = bits_of(torch.inf)
        return message

    outcomes = target("topk", 3).attack(forge)
    check_replicated(outcomes)
    check_indices(outcomes[0].update, N)
