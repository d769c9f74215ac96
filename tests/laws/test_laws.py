"""The laws of the library, for every scheme in the registry that communicates, over several steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.schemes import make
from gradsieve.testing.check import check_drains, totals
from gradsieve.testing.gradients import EXACT, KINDS, Source
from gradsieve.testing.laws import (
    check_conservation,
    check_indices,
    check_is_dense_sum,
    check_nothing_lost,
    check_nothing_mutated,
    check_one_threshold,
    check_replicated,
    check_round,
    check_same_states,
    rounds_freely,
)
from gradsieve.testing.ranks import VirtualRanks
from laws.cases import WORLDS, Case, cases, first, lengths, registered, schemes

every_scheme = pytest.mark.parametrize("name", schemes(registered()))


@every_scheme
@given(case=cases(exact=True))
def test_spent_adds_up_to_update_exactly_for_whole_numbers(name: str, case: Case) -> None:
    for round_ in case.fleet(name).advance(case.source, case.steps):
        check_conservation(round_, exact=True)


@every_scheme
@given(case=cases())
def test_every_round_is_lawful(name: str, case: Case) -> None:
    fleet = case.fleet(name)
    for round_ in fleet.advance(case.source, case.steps):
        check_round(round_, case.source.exact and not rounds_freely(make(name)))
    check_same_states(fleet.states)


@every_scheme
@given(case=cases(exact=True))
def test_no_gradient_is_lost_over_a_run_of_whole_numbers(name: str, case: Case) -> None:
    gradients, updates, residuals, _ = totals(case.fleet(name), case.source, case.steps)
    check_nothing_lost(gradients, updates, residuals, tolerance=torch.zeros_like(gradients))


@every_scheme
@given(case=cases())
def test_no_gradient_is_lost_over_a_run_within_rounding(name: str, case: Case) -> None:
    gradients, updates, residuals, moved = totals(case.fleet(name), case.source, case.steps)
    additions = 2 * case.steps + case.world
    check_nothing_lost(gradients, updates, residuals, moved * additions * torch.finfo(case.dtype).eps)


@every_scheme
@given(case=cases())
def test_density_one_is_the_dense_sum_bit_for_bit(name: str, case: Case) -> None:
    """Whatever the values otherwise travel as: a flush sends what waits as it is."""
    fleet = VirtualRanks(make(name, 1.0).whole(), case.sizes, case.world, case.dtype)
    for round_ in fleet.advance(case.source, min(case.steps, 4)):
        check_is_dense_sum(round_)


@every_scheme
@given(case=cases(), bad=st.sampled_from(["nan", "inf", "-inf"]), data=st.data())
def test_a_value_that_is_not_finite_crashes_nothing(
    name: str, case: Case, bad: str, data: st.DataObject
) -> None:
    """The pipeline votes on finiteness; a scheme need only stay in step and in range."""
    case = replace(case, sizes=(max(case.sizes[0], 1),))
    ranks = data.draw(st.sets(st.integers(0, case.world - 1), min_size=1))
    place = data.draw(st.integers(0, case.sizes[0] - 1))
    when = data.draw(st.integers(0, case.steps - 1))

    def poisoned(step: int, rank: int, bucket: int) -> Tensor:
        gradient = case.source(step, rank, bucket)
        if step == when and rank in ranks:
            gradient[place] = float(bad)
        return gradient

    for round_ in case.fleet(name).advance(poisoned, case.steps):
        check_replicated(round_.outcomes)
        check_nothing_mutated(round_)
        check_indices(round_.outcomes[0].update, case.sizes[0])


@every_scheme
@given(case=cases(buckets=4))
def test_laws_hold_and_thresholds_agree_over_several_buckets(name: str, case: Case) -> None:
    fleet = case.fleet(name)
    for _ in range(min(case.steps, 6)):
        for round_ in fleet.advance(case.source, 1):
            check_round(round_, case.source.exact and not rounds_freely(make(name)))
        for states in fleet.states:
            check_one_threshold(states)
    check_same_states(fleet.states)


@every_scheme
@given(case=cases(exact=True, buckets=3), cut=st.floats(0, 1))
def test_laws_hold_after_the_buckets_were_rebuilt(name: str, case: Case, cut: float) -> None:
    fleet = case.fleet(name)
    for _ in fleet.advance(case.source, 3):
        pass
    total = sum(case.sizes)
    sizes = (int(cut * total), total - int(cut * total))
    fleet.rebuild(sizes)
    for round_ in fleet.advance(replace(case, sizes=sizes).source, 4):
        check_round(round_, exact=True)


@every_scheme
@pytest.mark.parametrize("world", first(WORLDS, (1, 4, 7)))
def test_laws_hold_for_every_length_and_kind_of_gradient(name: str, world: int) -> None:
    """The table behind the drawn cases: no world size, length or kind is left to chance."""
    for n in lengths(world):
        for column, kind in enumerate(KINDS):
            case = Case(kind, world, (n,), density=[0.01, 0.3][column % 2], steps=3)
            for round_ in case.fleet(name).advance(case.source, case.steps):
                check_round(round_, case.source.exact and not rounds_freely(make(name)))


@every_scheme
@pytest.mark.parametrize(
    ("density", "dtype"), [(0.2, torch.float32), (0.5, torch.float64), (0.9, torch.float32)]
)
def test_laws_hold_when_fewer_elements_than_k_are_alive(
    name: str, density: float, dtype: torch.dtype
) -> None:
    """A third of k is there: a threshold that chases the target downwards has to stop somewhere."""
    alive = torch.arange(600) % 100 < 30 * density

    def mostly_dead(step: int, rank: int, bucket: int) -> Tensor:
        return Source("normal", (600,), 5, dtype)(step, rank, bucket) * alive

    for round_ in VirtualRanks(make(name, density), [600], 4, dtype).advance(mostly_dead, 50):
        check_round(round_, exact=False)


@every_scheme
@settings(max_examples=settings.default.max_examples // 2)  # each one is up to 400 steps long
@given(
    world=st.sampled_from([1, 2, 3, 4, 7]),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    kind=st.sampled_from([kind for kind in EXACT if kind not in ("zeros", "denormal")]),
    density=st.sampled_from([0.001, 0.05, 0.3]),
)
def test_a_residual_is_drained_to_the_end_when_gradients_stop(
    name: str, world: int, sizes: list[int], kind: str, density: float
) -> None:
    """Nothing starves, wherever it lies: after some steps of gradients and enough of silence all is sent."""
    check_drains(VirtualRanks(make(name, density), sizes, world), Source(kind, tuple(sizes)))


@every_scheme
def test_every_element_of_a_steady_gradient_is_sent_at_last(name: str) -> None:
    """Adversarial layout: half of the partitions hold ten times the other half."""
    n, world = 240, 4
    gradient = torch.where(torch.arange(n) % 120 < 60, 1.0, 10.0)
    fleet, seen = VirtualRanks(make(name, 0.1), [n], world), torch.zeros(n, dtype=torch.bool)
    for round_ in fleet.advance(lambda step, rank, bucket: gradient, 400):
        seen |= round_.outcomes[0].update.to_dense() != 0
        if seen.all():
            break
    assert seen.all(), f"{int((~seen).sum())} elements were never sent"
