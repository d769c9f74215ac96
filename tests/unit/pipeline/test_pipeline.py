"""The pipeline on virtual ranks: what it promises for every scheme, without a process or a socket."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.ops import Op
from gradsieve.errors import ConfigError
from gradsieve.pipeline.exchange_settings import Gradients
from gradsieve.pipeline.gradients import GradientPipeline
from gradsieve.schemes import make
from gradsieve.types import fields_to_tensors
from laws.cases import schemes
from multiproc.models import UNIT
from multiproc.training import (
    Plan,
    Seen,
    Virtual,
    check_applied,
    check_nothing_lost,
    check_replicas,
    differing,
    private_fields,
    registered,
)

every_scheme = pytest.mark.parametrize("scheme", schemes(registered()))
every_lossy_scheme = pytest.mark.parametrize("scheme", schemes(registered(lossless=False)))


def state_of(pipeline: GradientPipeline) -> dict[str, Tensor]:
    """All that outlives a step."""
    out = {"step": torch.tensor(pipeline.step), "scale": torch.tensor(pipeline.residual_scale)}
    for number, residual in enumerate(pipeline.residuals()):
        out[f"residual {number}"] = residual.clone()
    for number, state in enumerate(pipeline.states):
        out.update(fields_to_tensors(state, f"state {number}/"))
    return out


def states_of(virtual: Virtual) -> list[dict[str, Tensor]]:
    return [state_of(pipeline) for pipeline in virtual.pipelines]


def gradients_of(plan: Plan, step: int, world: int) -> list[list[Any]]:
    return [plan.gradients(step, rank) for rank in range(world)]


# -- the law ------------------------------------------------------------------------------------------

SHAPES = st.lists(
    st.sampled_from([(40, 30), (1100,), (7,), (32, 32), (5, 5), (1, 2000), (3, 20, 20), ()]),
    min_size=1,
    max_size=6,
).map(tuple)


@every_scheme
@given(
    shapes=SHAPES,
    world=st.sampled_from([1, 2, 4, 8]),
    density=st.sampled_from([0.001, 0.03, 0.3, 1.0]),
    cap_mb=st.sampled_from([1e-6, 0.004, 0.01, 25.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    steps=st.integers(1, 7),
)
def test_no_gradient_is_lost_and_replicas_are_the_same_bits(
    scheme: str, shapes: Any, world: int, density: float, cap_mb: float, dtype: torch.dtype, steps: int
) -> None:
    plan = Plan(scheme, density, steps, cap_mb, shapes, dtypes=(dtype,) * len(shapes))
    virtual = Virtual(plan, world)
    seen = virtual.train()
    check_replicas([replace_state(each) for each in seen])
    check_nothing_lost(seen)
    check_applied(seen)
    own = ("residual", *private_fields())
    replicated = [
        {key: part for key, part in state.items() if not any(name in key for name in own)}
        for state in states_of(virtual)
    ]
    assert all(differing(replicated[0], other) == [] for other in replicated)


def replace_state(seen: Seen) -> Seen:
    """Of virtual ranks, `Seen` holds the residuals only."""
    return replace(seen, state={})


@every_lossy_scheme
def test_density_one_is_the_dense_exchange(scheme: str) -> None:
    whole = make(scheme, 1.0).whole()  # whatever values travel as otherwise
    dense, full = (Virtual(Plan(name, density=1.0), 4).train() for name in ("dense", whole))
    assert differing(dense[0].parameters, full[0].parameters) == []
    assert not any(int(part.count_nonzero()) for part in full[0].residuals.values())


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        GradientPipeline({}, (), make("dense"), Gradients(), 0, 1)


# -- atomic steps -------------------------------------------------------------------------------------


@every_scheme
def test_one_bad_value_changes_nothing_on_any_rank(scheme: str) -> None:
    plan = Plan(scheme)
    virtual = Virtual(plan, 3)
    for step in range(4):
        virtual.step(gradients_of(plan, step, 3))
    before = states_of(virtual)
    everywhere = product(range(7), map(float, ("nan", "inf", "-inf")))
    for skipped, (place, bad) in enumerate(everywhere, start=1):
        gradients = gradients_of(plan, 4, 3)
        gradients[1][place].view(-1)[-1] = bad
        means = virtual.step(gradients)
        for rank, pipeline in enumerate(virtual.pipelines):
            assert (pipeline.last_step_good, pipeline.skipped) == (False, skipped)
            assert differing(before[rank], state_of(pipeline)) == []
            last = pipeline.units[-1].slots
            assert all(means[rank][slot.name].isnan().all() for slot in last), "a GradScaler must see it"
    virtual.step(gradients_of(plan, 5, 3))
    assert all(pipeline.last_step_good for pipeline in virtual.pipelines)


@every_scheme
@pytest.mark.parametrize("place", [1, 3], ids=["dense", "sparse"])
def test_a_sum_over_ranks_that_overflows_is_a_bad_step_for_all(scheme: str, place: int) -> None:
    """Each rank's value is finite; only the sum is not."""
    plan = Plan(scheme)
    virtual = Virtual(plan, 2)
    before = states_of(virtual)
    gradients = gradients_of(plan, 0, 2)
    round_robin = virtual.pipelines[0].scheme.round_robin  # the first stretch ends with the vector beside it
    for own in gradients:
        for each in (place, place + 1) if round_robin else (place,):
            own[each].fill_(3e38)
    virtual.step(gradients)
    assert [pipeline.skipped for pipeline in virtual.pipelines] == [1, 1]
    assert all(differing(old, new) == [] for old, new in zip(before, states_of(virtual), strict=True))


@every_lossy_scheme
def test_a_residual_never_overflows(scheme: str) -> None:
    """Gradients that are finite one by one add up beyond the type: such a step is skipped, not stored."""
    plan = Plan(scheme, density=0.001, shapes=((40, 40),))
    virtual = Virtual(plan, 2)
    for step in range(6):
        huge = [[torch.full((40, 40), 2e38 if (step + rank) % 2 else -1e30)] for rank in range(2)]
        virtual.step(huge)
        for pipeline in virtual.pipelines:
            assert next(pipeline.residuals()).isfinite().all()
    assert virtual.pipelines[0].skipped == virtual.pipelines[1].skipped


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (50,)], ids=["sparse", "dense"])
def test_a_mean_that_the_gradient_cannot_hold_is_a_bad_step(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    most = torch.finfo(dtype).max
    plan = Plan("topk", density=0.5, shapes=(shape,), dtypes=(dtype,))
    virtual = Virtual(plan, 1)
    virtual.step([[torch.full(shape, most)]])
    assert virtual.pipelines[0].skipped == 0, "the largest number fits"
    virtual.step([[torch.full(shape, most)]])
    virtual.step([[torch.full(shape, most)]])
    assert virtual.pipelines[0].skipped == (2 if len(shape) > 1 else 0)


@every_scheme
def test_a_step_that_breaks_off_leaves_no_trace(scheme: str) -> None:
    """A dead peer: the program of some unit never ends. The step is then done again from its first unit."""
    plan = Plan(scheme)
    broken, smooth = Virtual(plan, 2), Virtual(plan, 2)
    for step in range(4):
        begun = [
            pipeline.begin(gradients=flat(plan.gradients(99, rank)))
            for rank, pipeline in enumerate(broken.pipelines)
        ]
        for index in range(len(broken.pipelines[0].units)):
            before = states_of(broken)
            attempt = [
                pipeline.program(pending, index)
                for pipeline, pending in zip(broken.pipelines, begun, strict=True)
            ]
            if index < len(broken.pipelines[0].units) - 1:
                lockstep.run(attempt)
            else:
                for program in attempt:
                    assert isinstance(next(program), Op)
                    program.close()
            assert all(differing(old, new) == [] for old, new in zip(before, states_of(broken), strict=True))
        broken.step(gradients_of(plan, step, 2))
        smooth.step(gradients_of(plan, step, 2))
    assert all(differing(*pair) == [] for pair in zip(states_of(broken), states_of(smooth), strict=True))


def flat(gradients: list[Any]) -> dict[str, Tensor]:
    return {f"tensors.{place}": gradient.clone().flatten() for place, gradient in enumerate(gradients)}


# -- loss scale and unused parameters -----------------------------------------------------------------


@every_lossy_scheme
def test_residuals_follow_the_loss_scale(scheme: str) -> None:
    """Scales go up and down by powers of two: in unscaled units the law holds to the last bit."""
    plan, world = Plan(scheme), 2
    virtual = Virtual(plan, world)
    fed, applied = ([torch.zeros(shape).double() for shape in plan.shapes] for _ in range(2))
    for step, scale in enumerate([1.0, 1024.0, 2048.0, 512.0, 512.0, 4096.0]):
        for pipeline in virtual.pipelines:
            pipeline.note_loss_scale(scale)
        gradients = gradients_of(plan, step, world)
        means = virtual.step([[gradient * scale for gradient in own] for own in gradients])
        for place, shape in enumerate(plan.shapes):
            fed[place] += sum(own[place].double() for own in gradients)
            applied[place] += means[0][f"tensors.{place}"].view(shape).double() / scale
    held = [
        {key.removeprefix("residual/"): part for key, part in pipeline.memories().items()}
        for pipeline in virtual.pipelines
    ]
    for place, shape in enumerate(plan.shapes):
        name = f"tensors.{place}"
        kept = sum(part[name].view(shape).double() / 4096.0 for part in held) if name in held[0] else 0
        assert torch.equal(fed[place], world * applied[place] + kept), name


@every_lossy_scheme
@pytest.mark.parametrize("masked", [True, False])
def test_what_no_rank_used_gets_nothing_where_that_would_be_dropped(scheme: str, masked: bool) -> None:
    """And gets something where it would not: the twin."""
    plan = Plan(scheme)
    virtual = Virtual(plan, 2)
    for pipeline in virtual.pipelines:
        if masked:
            pipeline.keep_unused()
    for step in range(3):
        virtual.step(gradients_of(plan, step, 2))
    got = 0
    for step in range(3, 12):
        gradients = gradients_of(plan, step, 2)
        for own in gradients:
            own[3] = None
        means = virtual.step(gradients)
        got += int(means[0]["tensors.3"].count_nonzero())
        assert int(means[0]["tensors.0"].count_nonzero())
    below_the_constant = scheme == "hard-threshold"  # and there for good
    assert (got == 0) == (masked or below_the_constant)
    check_nothing_lost(virtual.seen_now())


def test_one_all_reduce_carries_values_and_vote() -> None:
    plan = Plan("dense", shapes=((4, 4),))
    virtual = Virtual(plan, 2)
    virtual.step([[torch.full((4, 4), UNIT)], [torch.full((4, 4), 3 * UNIT)]])
    assert virtual.pipelines[0].stats.meter.collectives == 1
    assert torch.equal(virtual.models[0].tensors[0], torch.full((4, 4), -2 * UNIT / 64))
