"""A rank's own model when nothing comes of an exchange, in a narrow type, and read in parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsieve.errors import GradsieveError
from gradsieve.models import WINDOWS, Models
from gradsieve.pipeline import StepPipeline
from gradsieve.pipeline.exchange_settings import Steps
from gradsieve.schemes import make
from gradsieve.types import Sparse
from gradsieve.units import make_units

N = 2048
CLOSE = {"rtol": 0.0, "atol": 2.0**-20}
"""What waits is a difference of two models: it is rounded as they are."""


def two_parameters(dtype: torch.dtype = torch.float32) -> tuple[Models, dict[str, Tensor]]:
    source = torch.Generator().manual_seed(0)
    parameters = {name: torch.randn(N // 2, generator=source).to(dtype) for name in ("p", "q")}
    named = {name: part.view(2, -1) for name, part in parameters.items()}
    return Models(named, make_units(named.items(), 1 << 30, small=1)), parameters


def whole(models: Models) -> Tensor:
    return models.residual(0).between(0, N)


def rebase(models: Models, preview: float, window: int) -> None:
    """After an exchange in which nothing was sent."""
    nothing = Sparse(torch.empty(0, dtype=torch.long), torch.empty(0), N)
    models.apply(0, nothing, nothing, 4)
    models.make_due(0, [slice(N * window // WINDOWS, N * (window + 1) // WINDOWS), nothing])
    models.rebase(preview)


@pytest.mark.parametrize("preview", [1.0, 0.5, 0.0])
def test_a_step_is_counted_once_however_often_it_is_looked_at_or_folded(preview: float) -> None:
    models, parameters = two_parameters()
    for part in parameters.values():
        part -= 0.25
    for window in (*range(WINDOWS), 0):
        torch.testing.assert_close(whole(models), torch.full((N,), 0.25), **CLOSE)
        rebase(models, preview, window)
    torch.testing.assert_close(whole(models), torch.full((N,), 0.25))
    own = torch.cat([*reversed(parameters.values())])  # units go backward
    torch.testing.assert_close(models.shared[0] - own, torch.full((N,), 0.25 * preview), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_rank_that_does_not_move_moves_nothing(dtype: torch.dtype) -> None:
    models, parameters = two_parameters(dtype)
    parameters["p"] -= 0.125
    before = whole(models)
    for step in range(3 * WINDOWS):
        rebase(models, 0.3, step % WINDOWS)
    torch.testing.assert_close(whole(models), before, **CLOSE)


def test_what_a_narrow_parameter_rounds_away_is_kept_in_the_shared_model() -> None:
    """A hundred means of a sixteenth of a unit in the last place: none of them shows, all of them count."""
    parameter = torch.ones(4, 4).bfloat16()
    models = Models({"p": parameter}, make_units([("p", parameter)], 1 << 30, small=1))
    update, spent = Sparse.full(torch.full((16,), 2.0**-11)), Sparse.full(torch.zeros(16))
    for _ in range(100):
        assert not models.residual(0).between(0, 16).any()
        models.apply(0, update, spent, 1)
        models.make_due(0, [update])
        models.rebase(1.0)
    assert bool(parameter.lt(1).all())
    assert torch.equal(models.shared[0], torch.full((16,), 1 - 100 * 2.0**-11))


def test_what_is_sent_is_gone_and_the_rest_waits() -> None:
    models, parameters = two_parameters()
    parameters["q"] -= 0.5
    rebase(models, 0.5, 0)
    places = torch.tensor([0, 5, 1023, 1024, 2047])
    before, shared = whole(models), models.shared[0].clone()
    update = Sparse(places, torch.ones(5), N)
    models.apply(0, update, Sparse(places, before[places] / 2, N), 4)
    models.make_due(0, [update])
    models.rebase(0.25)
    expected = before.clone()
    expected[places] /= 2
    torch.testing.assert_close(whole(models), expected, **CLOSE)
    shared[places] -= 0.25
    torch.testing.assert_close(models.shared[0], shared)


def test_units_after_one_that_failed_are_not_exchanged() -> None:
    """Their programs are queued already; nobody would take over what they give."""
    parameters = {"a": torch.zeros(40, 40), "b": torch.zeros(40, 40)}
    pipeline = StepPipeline(parameters, (), make("topk", 0.1), Steps(), 0, 2, 0.001)
    assert len(pipeline.units) == 2
    pending = pipeline.begin()
    first, second = (pipeline.program(pending, index) for index in range(2))
    next(first)  # its exchange is under way, and fails there
    first.close()
    with pytest.raises(GradsieveError, match="unit 0 of step 0 has failed"):
        next(second)
