"""The laws for published rules, all of them in few runs: most of their code is held to the laws elsewhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.pipeline.exchange_settings import PUBLISHED
from gradsieve.schemes import make
from gradsieve.testing.gradients import EXACT, Source
from gradsieve.testing.laws import (
    check_drained,
    check_is_dense_sum,
    check_nothing_lost,
    check_one_threshold,
    check_round,
    check_same_states,
)
from gradsieve.testing.ranks import VirtualRanks
from laws.cases import Case, cases, published
from laws.treated import Case as Training
from laws.treated import Receiving, check_released, check_untouched

every_scheme = pytest.mark.parametrize("name", published())
few = settings(max_examples=max(5, settings.default.max_examples // 3))

NEVER_SENT = {
    "oktopk-paper": "sums of zero are not gathered: ranks that cancel each other out keep what they have",
}
"""Published rules that leave something for ever once gradients stop, and why."""
EQUAL_ONES_WAIT = {
    "oktopk-paper": "what equals a threshold is not beyond it, and the guard passes all equal ones at once",
}
"""Published rules that never send some of what comes in every step, and why."""


@every_scheme
@few
@given(case=cases(), rebuilt=st.floats(0, 1))
def test_every_round_is_lawful_nothing_is_lost_and_density_one_is_dense(
    name: str, case: Case, rebuilt: float
) -> None:
    fleet, gradients, updates = case.fleet(name), torch.zeros(case.sizes[0]), torch.zeros(case.sizes[0])
    for round_ in fleet.advance(case.source, case.steps):
        check_round(round_, case.source.exact)
        updates = updates + round_.outcomes[0].update.to_dense().double()
        gradients = gradients + sum(case.source(round_.step, rank, 0).double() for rank in range(case.world))
    check_same_states(fleet.states)
    residuals = torch.stack([own[0].double() for own in fleet.residuals]).sum(0)
    if case.source.exact:
        check_nothing_lost(gradients, updates, residuals, torch.zeros_like(residuals))
    cut = int(rebuilt * case.sizes[0])
    fleet.rebuild((cut, case.sizes[0] - cut))
    other = replace(case, sizes=(cut, case.sizes[0] - cut))
    for round_ in fleet.advance(other.source, 2):
        check_round(round_, case.source.exact)
    for states in fleet.states:
        check_one_threshold(states)
    whole = VirtualRanks(make(name, 1.0).whole(), case.sizes, case.world, case.dtype)
    for round_ in whole.advance(case.source, 1):
        check_is_dense_sum(round_)


def left_waiting(name: str, world: int, sizes: list[int], kind: str) -> list[Tensor]:
    """On all ranks, after some steps of gradients and enough of silence."""
    fleet, source = VirtualRanks(make(name, 0.3), sizes, world), Source(kind, tuple(sizes))

    def then_silence(step: int, rank: int, bucket: int) -> Tensor:
        return source(step, rank, bucket) * (step < 12)

    while fleet.step < 400:
        for _ in fleet.advance(then_silence, 20):
            pass
        if not any(bool(residual.any()) for residual in chain(*fleet.residuals)):
            break
    return list(chain(*fleet.residuals))


@pytest.mark.parametrize("name", [name for name in published() if name not in NEVER_SENT])
@pytest.mark.parametrize("world", [1, 3, 4])
def test_a_residual_is_drained_to_the_end_when_gradients_stop(name: str, world: int) -> None:
    for turn, kind in enumerate([kind for kind in EXACT if kind not in ("zeros", "denormal")]):
        check_drained(left_waiting(name, world, [1 + 7 * turn, 5][: 1 + turn % 2], kind))


@pytest.mark.parametrize("name", NEVER_SENT)
def test_what_is_never_sent_is_published_and_its_reason_holds(name: str) -> None:
    """An exception that is not needed any more is none. What waits adds up to nothing: nothing is missing."""
    print(f"{name} is excepted from the law of draining: {NEVER_SENT[name]}")
    left = left_waiting(name, 2, [33], "integers")
    with pytest.raises(AssertionError, match="stay in the residual"):
        check_drained(left)
    check_drained([torch.stack(left).sum(0)])


def never_sent(name: str, gradient: Tensor) -> int:
    """Elements of a gradient that is the same in all steps."""
    fleet, seen = (
        VirtualRanks(make(name, 0.1), [len(gradient)], 4),
        torch.zeros(len(gradient), dtype=torch.bool),
    )
    for round_ in fleet.advance(lambda *_: gradient, 400):
        seen |= round_.outcomes[0].update.to_dense() != 0
        if seen.all():
            break
    return int((~seen).sum())


STEADY = torch.where(torch.arange(240) % 120 < 60, 1.0, 10.0)
"""Adversarial layout: half of the partitions hold ten times the other half."""


@every_scheme
def test_every_element_of_a_steady_gradient_is_sent_at_last(name: str) -> None:
    gradient = STEADY * torch.linspace(1, 2, 240) if name in EQUAL_ONES_WAIT else STEADY
    assert never_sent(name, gradient) == 0


@pytest.mark.parametrize("name", EQUAL_ONES_WAIT)
def test_equal_ones_wait_for_ever_by_published_rules(name: str) -> None:
    print(f"{name} is excepted where elements are equal to the last bit: {EQUAL_ONES_WAIT[name]}")
    assert never_sent(name, STEADY) > 0


@every_scheme
@pytest.mark.parametrize("world", [1, 3])
def test_in_its_treatment_all_ranks_are_given_the_same_and_a_skipped_step_leaves_no_trace(
    name: str, world: int
) -> None:
    case = Training(world=world, cap_mb=1e-6)
    ranks = Receiving(case, name, PUBLISHED)
    assert [len(pipeline.units) for pipeline in ranks.pipelines] == [1] * world
    for step in range(3):
        check_released(ranks.advance(step))
    before = ranks.memories()
    gradients = [case.numbers(3, rank) for rank in range(world)]
    gradients[-1]["first"][2] = torch.nan
    ranks.give(gradients)
    assert [pipeline.skipped for pipeline in ranks.pipelines] == [1] * world
    check_untouched(before, ranks.memories())
