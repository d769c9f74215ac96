"""A task of `gradsieve bench accuracy` that is learnt in no time, for tests of the benches that train."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradsieve_tools.bench.tasks import training as tasks
from gradsieve_tools.bench.tasks.data import Data, DataSet

TASK = "tiny"


def _few_numbers() -> DataSet:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 40, generator=random)
    target = inputs @ torch.randn(40, 3, generator=random)
    whole = Data((inputs,), target.argmax(1))
    return DataSet(whole.take(slice(64)), whole.take(slice(64, None)), kind=whole.target[:64])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(
        tasks.TASKS["mlp"],
        name=TASK,
        model=lambda: nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 3)),
        data=_few_numbers,
        batch=16,
        steps=30,
    )
    monkeypatch.setitem(tasks.TASKS, TASK, recipe)
