"""Tasks of `bench time-to-accuracy`: two of `training.py`, with models of any size and a rate that stays.

mlp           Fashion-MNIST, SGD with momentum   test accuracy
transformer   bytes of source text, AdamW        loss on unseen text
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt

import torch
from torch import nn

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.tasks import training as tasks
from gradsieve_tools.bench.tasks.data import source_text


def rate_at(step: int, steps: int) -> float:
    """Part of the learning rate: up in a line over a twentieth of the steps. It never falls: then a run would
    be as good as it gets at its end only, and all would take as many steps."""
    return min(1.0, (step + 1) / max(1, steps // 20))


@dataclass(frozen=True, slots=True)
class SizedTask:
    title: str
    measured_by: str
    recipe: tasks.Recipe
    model: Callable[[int], nn.Module]  # takes a width; the model has more parameters than its square
    narrowest: int  # every width is a multiple of it
    batch: int  # examples that one rank sees in a step
    rate: Callable[[int], float]  # takes a width

    def params(self, width: int) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.model(width).parameters())

    def width(self, params: int) -> int:
        least = self.params(self.narrowest)
        if params < least:
            raise ConfigError(f"the smallest model has {least:,} parameters, not {params:,}: raise --params")
        widths = range(self.narrowest, isqrt(params) + self.narrowest, self.narrowest)
        above = bisect_left(widths, params, key=self.params)
        return min(widths[max(0, above - 1) : above + 1], key=lambda width: abs(self.params(width) - params))

    def of(self, width: int) -> tasks.Recipe:
        return replace(self.recipe, model=partial(self.model, width), rate=self.rate(width), rate_at=rate_at)


TASKS = {
    "mlp": SizedTask(
        title="MLP on Fashion-MNIST",
        measured_by="test accuracy",
        recipe=replace(tasks.TASKS["mlp"], decay=0.0),
        model=tasks.mlp,
        narrowest=1,
        batch=32,
        rate=lambda _: 0.05,
    ),
    "transformer": SizedTask(
        title="transformer on source text",
        measured_by="loss on unseen text",
        recipe=replace(tasks.TASKS["transformer"], data=partial(source_text, windows=256)),
        model=tasks.transformer,
        narrowest=4,  # heads
        batch=8,
        rate=lambda width: 2e-3 * min(1.0, 128 / width),  # AdamW's steps are as long whatever the width
    ),
}
