"""A rank's own model when nothing comes of an exchange, in a narrow type, and read in parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradsieve.errors import GradsieveError
from gradsieve.feedback.local_steps import WINDOWS, LocalSteps
from gradsieve.feedback.units import make_units
from gradsieve.pipeline import StepPipeline
from gradsieve.schemes import make
from gradsieve.types import Outcome, Sparse

N = 2048
CLOSE = {"rtol": 0.0, "atol": 2.0**-20}
"""What waits is a difference of two models: it is rounded as they are."""


def local_steps(dtype: torch.dtype = torch.float32) -> tuple[LocalSteps, dict[str, Tensor]]:
    source = torch.Generator().manual_seed(0)
    parameters = {name: torch.randn(N // 2, generator=source).to(dtype) for name in ("p", "q")}
    (unit,) = make_units([(name, part.view(2, -1)) for name, part in parameters.items()], 1 << 30, small=1)
    return LocalSteps(unit, parameters), parameters


def whole(local: LocalSteps, parameters: dict[str, Tensor]) -> Tensor:
    return local.waiting(parameters).between(0, N)


def rebase(local: LocalSteps, parameters: dict[str, Tensor], preview: float, window: int) -> None:
    """After an exchange in which nothing was sent."""
    none = Sparse.full(torch.empty(0))
    local.apply(nothing(), nothing(), Outcome(none, none, None), parameters, 4, window)
    local.rebase(parameters, preview)


def nothing() -> Sparse:
    return Sparse(torch.empty(0, dtype=torch.long), torch.empty(0), N)


@pytest.mark.parametrize("preview", [1.0, 0.5, 0.0])
def test_a_step_is_counted_once_however_often_it_is_looked_at_or_folded(preview: float) -> None:
    local, parameters = local_steps()
    for part in parameters.values():
        part -= 0.25
    for window in (*range(WINDOWS), 0):
        torch.testing.assert_close(whole(local, parameters), torch.full((N,), 0.25), **CLOSE)
        rebase(local, parameters, preview, window)
    torch.testing.assert_close(whole(local, parameters), torch.full((N,), 0.25))
    own = torch.cat([*reversed(parameters.values())])  # units go backward
    torch.testing.assert_close(local.shared - own, torch.full((N,), 0.25 * preview), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_rank_that_does_not_move_moves_nothing(dtype: torch.dtype) -> None:
    local, parameters = local_steps(dtype)
    parameters["p"] -= 0.125
    before = whole(local, parameters)
    for step in range(3 * WINDOWS):
        rebase(local, parameters, 0.3, step % WINDOWS)
    torch.testing.assert_close(whole(local, parameters), before, **CLOSE)


@pytest.mark.parametrize("small", [1, 10**6])
def test_what_a_narrow_parameter_rounds_away_is_kept_in_the_shared_model(small: int) -> None:
    """A hundred means of a sixteenth of a unit in the last place: none of them shows, all of them count."""
    parameter = torch.ones(4, 4).bfloat16()
    (unit,) = make_units([("p", parameter)], 1 << 30, small=small)
    parameters = {"p": parameter.view(-1)}
    local = LocalSteps(unit, parameters)
    tiny = torch.full((16,), 2.0**-11)
    for _ in range(100):
        waits = local.waiting_dense(parameters) if small > 1 else local.waiting(parameters).between(0, 16)
        assert not waits.any()
        none, mine = Sparse.full(torch.empty(0)), torch.zeros(16)
        if small > 1:
            local.apply(
                nothing(), nothing(), Outcome(Sparse.full(tiny), Sparse.full(mine), None), parameters, 1, 0
            )
        else:
            local.apply(Sparse.full(tiny), Sparse.full(mine), Outcome(none, none, None), parameters, 1, 0)
        local.rebase(parameters, 1.0)
    assert bool(parameter.lt(1).all())
    shared = local.shared_dense if small > 1 else local.shared
    assert torch.equal(shared, torch.full((16,), 1 - 100 * 2.0**-11))


def test_what_is_sent_is_gone_and_the_rest_waits() -> None:
    local, parameters = local_steps()
    parameters["q"] -= 0.5
    rebase(local, parameters, 0.5, 0)
    places = torch.tensor([0, 5, 1023, 1024, 2047])
    before, shared = whole(local, parameters), local.shared.clone()
    spent = Sparse(places, before[places] / 2, N)
    update = Sparse(places, torch.ones(5), N)
    none = Sparse.full(torch.empty(0))
    local.apply(update, spent, Outcome(none, none, None), parameters, 4, 3)
    local.rebase(parameters, 0.25)
    expected = before.clone()
    expected[places] /= 2
    torch.testing.assert_close(whole(local, parameters), expected, **CLOSE)
    shared[places] -= 0.25
    torch.testing.assert_close(local.shared, shared)


def test_parts_of_what_waits_are_parts_of_the_whole() -> None:
    local, parameters = local_steps()
    for number, part in enumerate(parameters.values()):
        part -= torch.randn(N // 2, generator=torch.Generator().manual_seed(number))
    rebase(local, parameters, 0.5, 1)
    waiting, all_of_it = local.waiting(parameters), whole(local, parameters)
    assert torch.equal(waiting.between(1000, 1500), all_of_it[1000:1500])
    places = np.array([3, 1023, 1024, 2000])
    assert torch.equal(waiting.at(places, torch.from_numpy(places)), all_of_it[places])
    expected = (all_of_it[100:1900].abs() >= 0.5).nonzero().flatten()
    found, demand, _ = waiting.select(100, 1900, 0.5, expected.numel() + 1, 0.0)
    assert torch.equal(found[:-1], expected)
    assert int(demand) == expected.numel()


def test_units_after_one_that_failed_are_not_exchanged() -> None:
    """Their programs are queued already; nobody would take over what they give."""
    parameters = {"a": torch.zeros(40, 40), "b": torch.zeros(40, 40)}
    pipeline = StepPipeline(parameters.items(), make("topk", 0.1), 0, 2, bucket_cap_mb=0.001)
    assert len(pipeline.units) == 2
    flat = {name: parameter.view(-1) for name, parameter in parameters.items()}
    first, second = (pipeline.program(index, flat) for index in range(2))
    next(first)  # its exchange is under way, and fails there
    first.close()
    with pytest.raises(GradsieveError, match="an earlier unit"):
        next(second)
