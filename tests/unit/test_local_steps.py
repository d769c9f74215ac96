"""A rank's own model when nothing comes of an exchange, and in a narrow type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsieve.errors import GradsieveError
from gradsieve.feedback.local_steps import LocalSteps
from gradsieve.feedback.units import lay_units
from gradsieve.schemes import make
from gradsieve.sync import StepPipeline
from gradsieve.types import Sparse

N = 2048


def local_steps(dtype: torch.dtype = torch.float32) -> tuple[LocalSteps, dict[str, Tensor]]:
    source = torch.Generator().manual_seed(0)
    parameter = torch.randn(N, generator=source).to(dtype)
    (unit,) = lay_units([("p", parameter.view(2, -1))], 1 << 30, small=1)
    return LocalSteps(unit, {"p": parameter}), {"p": parameter}


def nothing() -> Sparse:
    return Sparse(torch.empty(0, dtype=torch.long), torch.empty(0), N)


def settle(local: LocalSteps, parameters: dict[str, Tensor], preview: float) -> None:
    local.accumulate(parameters)
    local.settle(nothing(), nothing(), torch.empty(0), parameters, 4, preview)


@pytest.mark.parametrize("preview", [1.0, 0.5, 0.0])
def test_a_step_is_counted_once_although_its_exchange_failed(preview: float) -> None:
    local, parameters = local_steps()
    settle(local, parameters, preview)
    parameters["p"] -= 0.25
    for _ in range(3):
        local.accumulate(parameters)
        local.reopen(parameters)
    waiting, _ = local.accumulate(parameters)
    torch.testing.assert_close(waiting, torch.full((N,), 0.25))


def test_it_would_be_counted_again_without_writing_the_model_anew() -> None:
    local, parameters = local_steps()
    settle(local, parameters, 0.5)
    parameters["p"] -= 0.25
    for _ in range(2):
        waiting, _ = local.accumulate(parameters)
    torch.testing.assert_close(waiting, torch.full((N,), 0.375))


def test_what_was_not_accumulated_is_not_written() -> None:
    """The programs of later units had not begun when the exchange failed: their steps are in x alone."""
    local, parameters = local_steps()
    parameters["p"] -= 0.25
    moved = parameters["p"].clone()
    local.reopen(parameters)
    assert torch.equal(parameters["p"], moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_rank_that_does_not_move_moves_nothing(dtype: torch.dtype) -> None:
    local, parameters = local_steps(dtype)
    parameters["p"] -= 0.125
    settle(local, parameters, 0.3)
    first = local.kept.clone()
    for _ in range(5):
        settle(local, parameters, 0.3)
    assert torch.equal(local.kept, first)


def test_units_after_one_that_failed_are_not_accumulated() -> None:
    """Their programs are queued already; what they would count now, nobody would write."""
    parameters = {"a": torch.zeros(40, 40), "b": torch.zeros(40, 40)}
    pipeline = StepPipeline(parameters.items(), make("topk", 0.1), 0, 2, bucket_cap_mb=0.001)
    assert len(pipeline.units) == 2
    flat = {name: parameter.view(-1) for name, parameter in parameters.items()}
    for part in flat.values():
        part -= 1.0
    first, second = (pipeline.program(index, flat) for index in range(2))
    next(first)  # its exchange is under way, and fails there
    first.close()
    with pytest.raises(GradsieveError, match="an earlier unit"):
        next(second)
    assert [bool(waiting.any()) for waiting in pipeline.waiting()] == [True, False]
