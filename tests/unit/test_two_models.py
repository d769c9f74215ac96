"""Which model a parameter holds, and what becomes of what a user does to it meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradsieve.errors import ConfigError
from gradsieve.models import Models
from gradsieve.pipeline import StepPipeline
from gradsieve.pipeline.exchange_settings import Steps
from gradsieve.schemes import make


def two_models(dtype: torch.dtype = torch.float32) -> tuple[Models, nn.Parameter, StepPipeline]:
    """Of one parameter, whose own model has moved by one."""
    parameter = nn.Parameter(torch.zeros(40, 40, dtype=dtype))
    pipeline = StepPipeline({"p": parameter}, (), make("topk", 0.1), Steps(), 0, 1)
    pipeline.models.own["p"] -= 1
    return pipeline.models, parameter, pipeline


def shown(parameter: Tensor) -> float:
    (value,) = set(parameter.detach().flatten().tolist())
    return value


def test_a_graph_from_before_a_step_is_refused_and_one_around_a_look_is_not() -> None:
    models, parameter, _ = two_models()
    loss = parameter.square().sum()
    models.show_own(models.look())
    loss.backward()
    assert parameter.grad is not None
    assert shown(parameter.grad) == -2
    loss = parameter.square().sum()
    models.show_shared()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_what_is_written_between_steps_is_in_the_shared_model(dtype: torch.dtype, how: str) -> None:
    models, parameter, pipeline = two_models(dtype)
    models.show_shared()
    with torch.no_grad():
        if how == "in place":
            parameter += 3
        else:
            parameter.data = torch.full_like(parameter, 3.0)
    models.show_own()
    assert shown(parameter) == -1
    pipeline.rebase()
    assert shown(parameter) == 2, "the rank's own model follows; what waits still waits"
    models.show_shared()
    assert shown(parameter) == 3


def test_a_model_that_was_cast_after_attach_is_refused() -> None:
    models, parameter, _ = two_models()
    parameter.data = parameter.data.double()
    with pytest.raises(ConfigError, match=r"'p' was moved, cast or reshaped .*float64"):
        models.show_shared()


def test_the_end_leaves_the_shared_model_where_the_parameter_was() -> None:
    models, parameter, _ = two_models()
    place = parameter.data_ptr()
    models.show_shared()
    models.end()
    assert parameter.data_ptr() == place
    assert shown(parameter) == 0
