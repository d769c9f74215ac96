"""The laws of treatments, for every scheme in the registry that communicates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsieve.models import WINDOWS
from gradsieve.schemes import SCHEMES, make
from gradsieve.testing.laws import same_bits
from gradsieve.units import flat_view
from laws.cases import WORLDS, registered, schemes
from laws.treated import (
    GRADIENTS,
    STEPS,
    Case,
    Receiving,
    Stepping,
    cases,
    check_models,
    check_one_model,
    check_released,
    check_shared,
    check_steps,
    check_untouched,
)

few = settings(max_examples=settings.default.max_examples // 3)  # each one trains up to 16 ranks
every_scheme = pytest.mark.parametrize("scheme", schemes(registered()))
every_lossy_scheme = pytest.mark.parametrize(
    "scheme", schemes(name for name in registered() if not SCHEMES[name].lossless)
)
DYADIC = [name for name, (_, preview) in STEPS.items() if preview is not None]
"""Treatments of steps in which nothing rounds."""


# -- steps ----------------------------------------------------------------------------------------------


@every_scheme
@few
@given(case=cases(), treatment=st.sampled_from(list(STEPS)), data=st.data())
def test_steps_are_conserved_and_shared_alike(
    scheme: str, case: Case, treatment: str, data: st.DataObject
) -> None:
    """With some ranks idle in some steps."""
    ranks = Stepping(case, scheme, *STEPS[treatment])
    for step in range(case.steps):
        idle = data.draw(st.sets(st.integers(0, case.world - 1), max_size=case.world), label="idle")
        ranks.advance(step, [*idle])
        check_steps(ranks, exact=case.exact and treatment in DYADIC)
    ranks.exchange(everything=True)
    check_steps(ranks, exact=case.exact and treatment in DYADIC)
    check_one_model(ranks)


@every_scheme
def test_no_number_of_ranks_is_left_to_chance(scheme: str) -> None:
    for turn, world in enumerate(WORLDS):
        treatment = list(STEPS)[(turn + len(scheme)) % len(STEPS)]
        case = Case(world, n=2 * turn + 1 + 40 * (turn % 2), steps=2, seed=turn)
        ranks = Stepping(case, scheme, *STEPS[treatment])
        for step in range(case.steps):
            ranks.advance(step)
            check_steps(ranks, exact=case.exact and treatment in DYADIC)


@every_scheme
@few
@given(case=cases())
def test_density_one_is_training_on_the_mean_step(scheme: str, case: Case) -> None:
    ranks = Stepping(case, make(scheme, 1.0).whole(), *STEPS["measured"])
    wanted = {name: flat_view(p).double() for name, p in case.model().items()}
    for step in range(case.steps):
        ranks.advance(step)
        check_one_model(ranks)
        for name, parameter in wanted.items():
            parameter -= (
                sum(case.numbers(step, rank)[name].double() for rank in range(case.world)) / case.world
            )
            found = ranks.flat[0][name].double()
            assert torch.allclose(found, parameter, rtol=0, atol=0 if case.exact else 1e-6)


@every_scheme
@few
@given(case=cases(), treatment=st.sampled_from(list(STEPS)))
def test_an_idle_rank_pays_its_share_and_no_more(scheme: str, case: Case, treatment: str) -> None:
    ranks = Stepping(case, scheme, *STEPS[treatment])
    for step in range(case.steps):
        ranks.advance(step)
    kept = [part.clone() for part in ranks.pipelines[0].residuals()]
    begun = ranks.carry(ranks.begin())  # nobody moved since
    assert same_bits(list(ranks.pipelines[0].residuals()), kept), (
        "a model that did not move has something new to tell"
    )
    spent = [staged.outcome.spent.to_dense() for staged in begun[0].results]
    ranks.pipelines[0].finish(begun[0])
    for before, paid, after in zip(kept, spent, ranks.pipelines[0].residuals(), strict=True):
        assert torch.allclose(after, before - paid, rtol=0.0, atol=2.0**-22)


@every_scheme
def test_a_rank_whose_optimizer_overflowed_has_nothing_to_tell_and_gets_a_model_again(scheme: str) -> None:
    """What waited hidden is still told; what was in its ruined model is gone with it."""
    case = Case(world=4)
    ranks = Stepping(case, scheme, *STEPS["whole"])
    for step in range(3):
        ranks.advance(step)
    for bad, parameter in zip([torch.nan, torch.inf, -torch.inf], ranks.flat[1].values(), strict=True):
        parameter.fill_(bad)
    for _ in range(WINDOWS):
        ranks.exchange()
        check_shared(ranks)
    check_models(ranks, exact=True)
    assert all(parameter.isfinite().all() for own in ranks.flat for parameter in own.values())
    assert ranks.pipelines[0].skipped == 0


# -- gradients ------------------------------------------------------------------------------------------


@every_scheme
@few
@given(case=cases(), treatment=st.sampled_from(list(GRADIENTS)))
def test_every_rank_is_given_the_same(scheme: str, case: Case, treatment: str) -> None:
    ranks = Receiving(case, scheme, GRADIENTS[treatment])
    for step in range(case.steps):
        check_released(ranks.advance(step))


@every_lossy_scheme
@pytest.mark.parametrize("treatment", GRADIENTS)
def test_a_skipped_step_leaves_every_memory_as_it_was(scheme: str, treatment: str) -> None:
    case = Case(world=3, cap_mb=1e-6)
    ranks = Receiving(case, scheme, GRADIENTS[treatment])
    for step in range(3):
        ranks.advance(step)
    before = ranks.memories()
    gradients = [case.numbers(3, rank) for rank in range(3)]
    gradients[1]["first"][2] = torch.nan
    ranks.give(gradients)
    assert [pipeline.skipped for pipeline in ranks.pipelines] == [1, 1, 1]
    check_untouched(before, ranks.memories())
    ranks.advance(4)
    assert all(pipeline.last_step_good for pipeline in ranks.pipelines)
