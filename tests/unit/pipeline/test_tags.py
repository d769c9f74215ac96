"""Ranks that do different things find out, all of them, from two sums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.comm import lockstep
from gradsieve.comm.ops import AllReduce
from gradsieve.errors import MismatchError
from gradsieve.pipeline.tags import CALLS, IDLE, Tag, agree, explain, is_notice_given, who_is_idle, words
from gradsieve.types import Program

CPU = torch.device("cpu")
tags = st.builds(
    Tag, st.integers(0, len(CALLS) - 1), st.integers(0, 40), st.integers(0, 3), st.integers(0, 2)
)


def meeting(tag: Tag, rank: int, world: int, idle: int = 0) -> Program[str]:
    sums = (yield AllReduce(torch.tensor(words(tag, rank, idle, False)))).tolist()
    yield from agree(tag, sums, rank, world, CPU)
    return who_is_idle(sums)


def meet(each: Sequence[Tag]) -> list[str]:
    return lockstep.run([meeting(tag, rank, len(each)) for rank, tag in enumerate(each)])


@given(tag=tags, world=st.integers(1, 40))
def test_ranks_that_agree_go_on(tag: Tag, world: int) -> None:
    assert meet([tag] * world) == [""] * world


@given(each=st.lists(tags, min_size=2, max_size=9))
def test_either_all_ranks_find_out_or_none(each: list[Tag]) -> None:
    """In lockstep a rank that went on while others gather would be named as asking for nothing more."""
    if len({tag.number for tag in each}) > 1:
        with pytest.raises(MismatchError, match="rank 0: "):
            meet(each)
    else:
        assert meet(each) == [""] * len(each)


def test_a_rank_midway_between_the_others_finds_out_too() -> None:
    """The sum of the numbers is as many times its own; that of the squares is not."""
    with pytest.raises(MismatchError, match="rank 0: "):
        meet([Tag(0), Tag(1), Tag(2)])


def test_ranks_that_differ_in_one_thing_have_different_numbers() -> None:
    base = Tag(1, 5, 1, 1)
    for change in range(1, 3):
        for other in (
            Tag((1 + change) % 3, 5, 1, 1),
            Tag(1, 5 + change, 1, 1),
            Tag(1, 5, 1 + change, 1),
            Tag(1, 5, 1, 1 + change),
            Tag(1, 5, 1, 1, change),
        ):
            assert other.number != base.number


@pytest.mark.parametrize("world", [2, 3, 1000, 70_000])
def test_no_mixture_of_two_or_three_numbers_passes_for_one(world: int) -> None:
    """Sums in float32, as they are formed."""
    third = world // 3
    for one, two, three in product(range(16), repeat=3):
        counts = [world - 2 * third, third, third] if third else [1, 1, 0]
        if len({number for number, count in zip((one, two, three), counts, strict=True) if count}) < 2:
            continue
        values = torch.tensor([one, two, three], dtype=torch.float32)
        of = torch.tensor(counts, dtype=torch.float32)
        sums = float((values * of).sum()), float((values.square() * of).sum())
        for own in (one, two, three):
            assert not (sums[0] == world * own and sums[1] == world * own**2)


def test_the_idle_are_named() -> None:
    def all_of(idle: list[int]) -> str:
        programs = [meeting(Tag(), rank, len(idle), each) for rank, each in enumerate(idle)]
        (said,) = set(lockstep.run(programs))
        return said

    assert all_of([0, IDLE - 1, 0]) == ""
    assert all_of([0, 0, IDLE]) == "rank 2"
    assert all_of([IDLE, 0, 3 * IDLE]) == "2 ranks"


def test_a_notice_to_one_is_heard_by_all() -> None:
    def meet(notices: list[bool]) -> list[bool]:
        def rank(number: int) -> Program[bool]:
            said = torch.tensor(words(Tag(), number, IDLE, notices[number]))
            return is_notice_given((yield AllReduce(said)).tolist())

        return lockstep.run([rank(number) for number in range(len(notices))])

    assert meet([False, False, True]) == [True] * 3
    assert meet([True] * 3) == [True] * 3
    assert meet([False] * 3) == [False] * 3


@pytest.mark.parametrize(
    ("each", "words"),
    [
        ([Tag(1), Tag(0), Tag(0)], "rank 0 called flush() after step 0 while ranks 1, 2 went on training"),
        ([Tag(2), Tag(1)], "rank 0 load_state_dict(), rank 1 flush()"),
        ([Tag(0, 4), Tag(0, 4), Tag(0, 3)], "rank 2 at step 3, the other ranks at step 4"),
        ([Tag(0, 4, since=2), Tag(0, 4, since=1)], "since exchange 4: rank 1 1, the other ranks 2"),
        ([Tag(loads=1), Tag(), Tag()], "1 times on rank 0 and 0 times on the other ranks"),
        ([Tag(99), Tag(0)], "called an unknown call"),
    ],
)
def test_what_is_said_names_call_and_rank(each: list[Tag], words: str) -> None:
    assert words in explain(each)
