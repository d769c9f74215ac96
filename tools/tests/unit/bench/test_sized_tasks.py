"""Tasks of `bench time-to-accuracy`: models of any size, and a learning rate that stays."""

from __future__ import annotations

import pytest
import torch

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.tasks.sized import TASKS, rate_at

every_task = pytest.mark.parametrize("name", TASKS)


@every_task
@pytest.mark.parametrize("params", [20_000, 200_000, 1_000_000, 6_000_000])
def test_no_other_width_comes_closer_to_the_size_asked_for(name: str, params: int) -> None:
    task = TASKS[name]
    width = task.width(params)
    assert width % task.narrowest == 0

    def distance(width: int) -> int:
        return abs(sum(each.numel() for each in task.model(width).parameters()) - params)

    assert distance(width) <= min(distance(width - task.narrowest), distance(width + task.narrowest))


@every_task
def test_the_smallest_model_is_made_and_a_smaller_one_is_refused(name: str) -> None:
    task = TASKS[name]
    least = task.params(task.narrowest)
    assert task.width(least) == task.narrowest
    with pytest.raises(ConfigError, match="raise --params"):
        task.width(least - 1)


def test_the_rate_of_the_wide_transformer_is_lower_and_that_of_the_mlp_is_not() -> None:
    transformer, mlp = TASKS["transformer"], TASKS["mlp"]
    rates = [transformer.rate(transformer.width(params)) for params in (50_000, 400_000, 6_000_000)]
    assert rates[:2] == [2e-3, 2e-3]
    assert 4e-4 < rates[2] < 6e-4
    assert mlp.rate(10) == mlp.rate(2000)


def test_the_rate_rises_over_a_twentieth_of_the_steps_and_stays() -> None:
    assert [rate_at(step, 100) for step in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert {rate_at(step, 100) for step in range(4, 200)} == {1.0}
    assert rate_at(0, 3) == 1.0


def test_a_transformer_learns_by_adamw_at_its_rate_beyond_the_budget_too() -> None:
    task = TASKS["transformer"]
    training = task.of(16)(0, steps=40, batch=4)
    assert isinstance(training.optimizer, torch.optim.AdamW)
    assert training.metric == "loss"
    for _ in range(80):
        training.optimizer.step()
        training.schedule.step()
    assert training.schedule.get_last_lr() == [task.rate(16)]
