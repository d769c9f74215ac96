"""Mutated messages: refused, or harmless; never another crash, now or in the steps after."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.ops import AllGather, AllReduce
from gradsieve.errors import Malformed
from gradsieve.schemes.exclusive import HEADER
from gradsieve.testing.laws import check_indices, check_replicated
from gradsieve.types import Ctx, Outcome, Program
from hostile.evil import COUNTS_FIRST, EVIL, WORLD, Forgery, N, Target, bits_of, same_message, target
from laws.cases import registered

GATHERING = [
    "topk",
    "topk-union",
    "gtopk",
    "cltk",
    "micro",
    "deft",
    "exdyna",
    "oktopk",
    "spardl",
    "stripes",
    *COUNTS_FIRST,
]
INTERESTING = [
    0,
    1,
    -1,
    N - 1,
    N,
    N + 1,
    2**31 - 1,
    -(2**31),
    bits_of(1e38),
    bits_of(-1e38),
    bits_of(torch.nan),
]
numbers = st.sampled_from(INTERESTING) | st.integers(0, N) | st.integers(-(2**31), 2**31 - 1)
edits = st.lists(st.tuples(st.integers(0, 500), numbers), min_size=1, max_size=5)
twice_as_many = settings(max_examples=2 * settings.default.max_examples)


@cache
def victim(name: str, steps: int) -> Target:
    """Attacks change nothing, so that one target serves them all."""
    return target(name, steps)


def survives(victim: Target, forge: Forgery) -> None:
    """Either Malformed, or an update that is lawful and a state that training goes on from."""
    try:
        outcomes = victim.attack(forge)
    except Malformed:
        event("refused")
        return
    event("harmless")
    check_replicated(outcomes)
    check_indices(outcomes[0].update, N)
    goes_on(victim, outcomes[0])


def goes_on(victim: Target, outcome: Outcome[object]) -> None:
    """Six honest steps from the state that the lie left behind."""
    state = outcome.state
    for step in range(victim.step + 1, victim.step + 7):
        state = victim.scheme.next_states([state])[0]
        programs = [
            victim.scheme.exchange(acc, state, Ctx(r, WORLD, step)) for r, acc in enumerate(victim.accs)
        ]
        outcomes = lockstep.run(programs)
        check_replicated(outcomes)
        check_indices(outcomes[0].update, N)
        state = outcomes[0].state


@pytest.mark.parametrize("name", GATHERING)
@twice_as_many
@given(edits=edits, steps=st.sampled_from([0, 3, 4]))
def test_a_message_with_some_words_changed_is_refused_or_harmless(
    name: str, edits: list[tuple[int, int]], steps: int
) -> None:
    last = 2 if name == "oktopk" else 1 if name in COUNTS_FIRST else 0  # counts are forged below

    def forge(turn: int, message: Tensor) -> Tensor:
        words = message.view(-1)
        for place, value in edits if turn == last else ():
            words[place % words.numel()] = value % 256 if words.dtype == torch.uint8 else value
        return message

    survives(victim(name, steps), forge)


@pytest.mark.parametrize("name", GATHERING)
@twice_as_many
@given(seed=st.integers(0, 10_000), steps=st.sampled_from([0, 3]), low=st.sampled_from([0, -3, -(2**31)]))
def test_a_message_of_noise_is_refused_or_harmless(name: str, seed: int, steps: int, low: int) -> None:
    source = torch.Generator().manual_seed(seed)

    def forge(turn: int, message: Tensor) -> Tensor:
        if (name in COUNTS_FIRST and turn == 0) or (name == "oktopk" and turn in (0, 1, 3)):
            return message
        noise = torch.randint(low, N + 3 if low > -9 else 2**31 - 1, message.shape, generator=source)
        return noise.to(message.dtype).sort().values if seed % 2 else noise.to(message.dtype)

    survives(victim(name, steps), forge)


@twice_as_many
@given(count=st.integers(-2, N + 2) | numbers, row=st.lists(numbers, max_size=N), ordered=st.booleans())
def test_published_exdyna_survives_a_peer_that_lies_about_its_count(
    count: int, row: list[int], ordered: bool
) -> None:
    """This liar keeps to the sizes that its lie demands, so that nothing but the check can stop it."""
    goal = victim("exdyna-paper", 3)

    def liar() -> Program[None]:
        counts = yield AllGather(torch.tensor([count]))
        words = (sorted(set(row)) if ordered else row) + [0] * N
        yield AllGather(torch.tensor(words[: int(counts.max())], dtype=torch.int32))
        yield AllReduce(torch.zeros(int(counts.sum())))

    survives_beside(liar(), goal)


@pytest.mark.parametrize("name", ["hard-threshold", "gaussiank", "sidco", "dgc"])
@twice_as_many
@given(count=st.integers(-2, N + 2) | numbers, row=st.lists(numbers, max_size=N), ordered=st.booleans())
def test_schemes_of_unequal_rows_survive_a_peer_that_lies_about_its_count(
    name: str, count: int, row: list[int], ordered: bool
) -> None:
    """As above, with rows that are filled up with N."""

    def liar() -> Program[None]:
        counts = yield AllGather(torch.tensor([count], dtype=torch.int32))
        words = torch.tensor((sorted(set(row)) if ordered else row) + [N] * N, dtype=torch.int32)
        indices = words[: int(counts.max())]
        rows = yield AllGather(indices if name == "hard-threshold" else torch.stack([indices, indices]))
        if name == "hard-threshold":
            yield AllReduce(torch.zeros(torch.unique(rows[rows < N]).numel()))

    survives_beside(liar(), victim(name, 3))


def survives_beside(liar: Program[None], goal: Target) -> None:
    """The honest ranks refuse, or end with lawful updates."""
    programs = [
        goal.scheme.exchange(acc, state, Ctx(rank, WORLD, goal.step))
        for rank, (acc, state) in enumerate(zip(goal.accs, goal.states, strict=True))
    ]
    programs[EVIL] = quiet(liar)
    try:
        outcomes = lockstep.run(programs)
    except Malformed:
        event("refused")
        return
    event("harmless")
    check_replicated([outcome for rank, outcome in enumerate(outcomes) if rank != EVIL])
    check_indices(outcomes[0].update, N)


def quiet(program: Program[None]) -> Program[None]:
    """Its own trouble is its own."""
    try:
        yield from program
    except (RuntimeError, ValueError):
        return


def test_the_fuzz_reaches_both_ends() -> None:
    """The twin: one lie is harmless and one is refused, so that neither branch of `survives` is dead."""
    goal = victim("exdyna", 4)

    def none(turn: int, message: Tensor) -> Tensor:
        return message.zero_()

    def emptied(turn: int, message: Tensor) -> Tensor:
        message[HEADER:] = 0
        return message

    assert goal.attack(none)[0].update.count < goal.attack(same_message)[0].update.count
    with pytest.raises(Malformed):
        goal.attack(emptied)


def test_every_scheme_that_gathers_indices_is_under_this_fire() -> None:
    """A new scheme whose messages hold integers has to be added to the lists in this folder."""
    gathering = []
    for name in [*registered(), "exdyna-paper"]:
        seen: list[bool] = []

        def note(turn: int, message: Tensor, seen: list[bool] = seen) -> Tensor:
            seen.append(not message.is_floating_point())
            return message

        victim(name, 3).attack(note)
        gathering += [name] * any(seen)
    assert sorted(gathering) == sorted(GATHERING)
