"""The laws of treatments, for every scheme in the registry that communicates."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.feedback.local_steps import WINDOWS
from gradsieve.feedback.units import flat_view
from gradsieve.pipeline.exchange_settings import Gradients, Steps
from gradsieve.pipeline.optimizer_adapter import adapt
from gradsieve.schemes import SCHEMES, make
from gradsieve.testing.laws import same_bits
from gradsieve.types import Outcome, Sparse
from laws.cases import WORLDS, registered
from laws.treated import (
    GRADIENTS,
    STEPS,
    Case,
    Ranks,
    Receiving,
    Stepping,
    cases,
    check_by_rate,
    check_estimates,
    check_models,
    check_one_model,
    check_released,
    check_shared,
    check_steps,
    check_untouched,
    check_velocities,
)

few = settings(max_examples=settings.default.max_examples // 3)  # each one trains up to 16 ranks
every_scheme = pytest.mark.parametrize("scheme", registered())
every_lossy_scheme = pytest.mark.parametrize(
    "scheme", [name for name in registered() if not SCHEMES[name].lossless]
)
DYADIC = [name for name, treatment in STEPS.items() if treatment.preview is not None]
"""Treatments of steps in which nothing rounds."""


# -- steps ----------------------------------------------------------------------------------------------


@every_scheme
@few
@given(case=cases(), treatment=st.sampled_from(list(STEPS)), data=st.data())
def test_steps_are_conserved_and_shared_alike(
    scheme: str, case: Case, treatment: str, data: st.DataObject
) -> None:
    """With some ranks idle in some steps."""
    ranks = Stepping(case, scheme, STEPS[treatment])
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
        ranks = Stepping(case, scheme, STEPS[treatment])
        for step in range(case.steps):
            ranks.advance(step)
            check_steps(ranks, exact=case.exact and treatment in DYADIC)


@every_scheme
@few
@given(case=cases())
def test_density_one_is_training_on_the_mean_step(scheme: str, case: Case) -> None:
    ranks = Stepping(case, make(scheme, 1.0).whole(), STEPS["measured"])
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
    ranks = Stepping(case, scheme, STEPS[treatment])
    for step in range(case.steps):
        ranks.advance(step)
    kept = [part.clone() for part in ranks.pipelines[0].waiting()]
    ranks.run(ranks.flat)  # nobody moved since
    assert same_bits(list(ranks.pipelines[0].waiting()), kept), (
        "a model that did not move has something new to tell"
    )
    spent = [staged.outcome.spent.to_dense() for staged in ranks.pipelines[0]._arriving]
    ranks.pipelines[0].finish(ranks.flat[0])
    for before, paid, after in zip(kept, spent, ranks.pipelines[0].waiting(), strict=True):
        assert torch.allclose(after, before - paid, rtol=0.0, atol=2.0**-22)


@every_scheme
def test_a_rank_whose_optimizer_overflowed_has_nothing_to_tell_and_gets_a_model_again(scheme: str) -> None:
    """What waited hidden is still told; what was in its ruined model is gone with it."""
    case = Case(world=4)
    ranks = Stepping(case, scheme, STEPS["whole"])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_a_narrow_parameter_is_not_a_step(dtype: torch.dtype) -> None:
    """The shared model is wide: halves of a unit that the parameter cannot hold are kept in it."""
    case = Case(world=2, n=9)
    ranks = Stepping(case, "topk", STEPS["half"])
    ranks.flat = [{name: p.to(dtype) for name, p in own.items()} for own in ranks.flat]
    ranks.pipelines = [
        type(one)(ranks.flat[rank].items(), one.scheme, rank, 2, 25.0, Steps(small=0, preview=0.5))
        for rank, one in enumerate(ranks.pipelines)
    ]
    ranks.flat[0]["last"].mul_(3.0)
    ranks.exchange()
    for pipeline in ranks.pipelines:
        pipeline.local[0].shared.add_(2.0**-20)  # what bfloat16 and float16 round away
        pipeline.local[0].anchor.add_(2.0**-20)
    kept = [next(pipeline.waiting()).clone() for pipeline in ranks.pipelines]
    for pipeline, own in zip(ranks.pipelines, ranks.flat, strict=True):
        for window in range(WINDOWS):
            local = pipeline.local[0]
            nothing = Sparse(torch.empty(0, dtype=torch.long), torch.empty(0), local.unit.n)
            none = Sparse.full(torch.empty(0))
            local.apply(nothing, nothing, Outcome(none, none, None), own, 2, window)
            local.rebase(own, 0.5)
    assert same_bits([next(pipeline.waiting()) for pipeline in ranks.pipelines], kept)


# -- gradients ------------------------------------------------------------------------------------------


@every_scheme
@few
@given(case=cases(), treatment=st.sampled_from(list(GRADIENTS)))
def test_every_rank_is_given_the_same_and_memories_are_what_they_say(
    scheme: str, case: Case, treatment: str
) -> None:
    ranks = Receiving(case, scheme, GRADIENTS[treatment])
    clips = GRADIENTS[treatment].clip is not None
    for step in range(case.steps):
        before = ranks.memories()
        given_ = [case.numbers(step, rank) for rank in range(case.world)]
        check_released(ranks.advance(step))
        check_estimates(ranks, exact=False)
        if ranks.pipelines[0].velocities and not clips:
            check_velocities(ranks, before, given_)


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


@every_lossy_scheme
@pytest.mark.parametrize("treatment", ["estimate", "estimate, momentum"])
@few
@given(case=cases(worlds=[1, 2, 4, 8, 16]))
def test_a_total_is_the_sum_of_estimates(scheme: str, treatment: str, case: Case) -> None:
    ranks = Receiving(case, scheme, GRADIENTS[treatment])
    for step in range(case.steps):
        ranks.advance(step)
        check_estimates(ranks, exact=True)
    last = [case.numbers(99, rank) for rank in range(case.world)]
    mean = {name: sum(own[name] for own in last) / case.world for name in last[0]}
    if treatment == "estimate":
        for own in ranks.give(last, everything=True):
            assert all(torch.equal(own[name], mean[name]) for name in mean)


@every_lossy_scheme
@few
@given(
    case=cases(),
    rates=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 0.3, 0.01]), min_size=1, max_size=6),
    late=st.booleans(),
)
def test_a_schedule_does_not_change_what_waits(
    scheme: str, case: Case, rates: list[float], late: bool
) -> None:
    """A schedule that begins at 0 counts its first gradients at the first rate above."""
    ranks = Receiving(case, scheme, GRADIENTS["by rate"])
    moved, fed = ({n: torch.zeros(p.numel()).double() for n, p in ranks.model.items()} for _ in range(2))
    for step, rate in enumerate([0.0] * late + rates):
        for pipeline in ranks.pipelines:
            pipeline.rate = rate
        means = ranks.advance(step)
        counted = rate or rates[0]
        for name in moved:
            moved[name] += counted * case.world * means[0][name].double()
            fed[name] += counted * sum(case.numbers(step, rank)[name].double() for rank in range(case.world))
    exact = case.exact and all(rate in (0.25, 0.5, 1.0, 2.0) for rate in rates)
    check_by_rate(moved, fed, ranks, room=0.0 if exact else 2e-4 * case.world)


@every_lossy_scheme
@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize(("momentum", "nesterov"), [("local", False), ("local", True), ("masked", True)])
def test_with_everything_sent_local_momentum_is_sgd(
    scheme: str, world: int, momentum: Any, nesterov: bool
) -> None:
    case = Case(world)
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, "nesterov": nesterov}
    treatment = Gradients(momentum=momentum, small=6)
    models = [{n: p.double().requires_grad_() for n, p in case.model().items()} for _ in range(world + 1)]
    optimizers = [torch.optim.SGD(model.values(), **settings) for model in models]
    fitted = [
        adapt(models[rank], [optimizers[rank]], make(scheme, 1.0).whole(), treatment, rank, world)
        for rank in range(world)
    ]
    ranks = Ranks()
    ranks.pipelines = [one.pipeline for one in fitted]
    for step in range(4):
        numbers = [case.numbers(step, rank) for rank in range(world)]
        mean = {name: sum(own[name].double() for own in numbers) / world for name in numbers[0]}
        for model, own in zip(models, [*numbers, mean], strict=True):
            for name, parameter in model.items():
                parameter.grad = own[name].double().view_as(parameter)
        ranks.run([one.tensors() for one in fitted])
        for optimizer in optimizers:
            optimizer.step()
        for model in models[:world]:
            for name, parameter in model.items():
                assert torch.allclose(parameter, models[-1][name], rtol=0, atol=1e-12), name


@every_lossy_scheme
@pytest.mark.parametrize("cap_mb", [1e-6, 25.0])
def test_what_is_accumulated_is_clipped_to_the_norm(scheme: str, cap_mb: float) -> None:
    """Over sqrt(P), for all units together, whatever else is in the mapping that a unit is handed."""
    case, bound = Case(world=4, cap_mb=cap_mb), 0.05
    ranks = Receiving(case, make(scheme, 1.0).whole(), GRADIENTS["clipped"])
    for scale in (1.0, 2.0**-12):
        given_ = [{n: g * scale for n, g in case.numbers(0, rank).items()} for rank in range(4)]
        mean = {name: sum(own[name] for own in given_) / 4 for name in given_[0]}
        released = ranks.give(given_)
        check_released(released)
        norm = _norm(released[0])
        assert norm <= bound / 2 * 1.0001
        if scale < 1:
            assert all(torch.equal(released[0][name], mean[name]) for name in mean), "short ones stay"


def _norm(parts: dict[str, Tensor]) -> float:
    return float(torch.cat([*parts.values()]).norm())


def test_exchanges_of_both_kinds_are_in_the_tables() -> None:
    """Every setting is tried. When an exchange begins (`every`) and ends (`overlap`) is not a
    pipeline's matter alone: test_every.py, tests/multiproc/test_overlap.py."""
    tried = [*STEPS.values(), *GRADIENTS.values()]
    for kind in (Steps, Gradients):
        of_kind = [settings for settings in tried if isinstance(settings, kind)]
        for field in {each.name for each in fields(kind)} - {"every", "overlap"}:
            assert len({getattr(settings, field) for settings in of_kind}) > 1, field
