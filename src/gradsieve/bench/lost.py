"""`gradsieve bench lost`: the gradient that a scheme loses over a training, to the last bit.

Recorded gradients are rounded to multiples of one power of two, 2^-40 of the largest element, and exchanged
in float64: then no sum over ranks and steps rounds, and what is missing is the scheme's doing alone.

    lost = |all gradients - all updates - all residuals| over |all updates|, as sums of magnitudes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsieve.bench.memory import check_fits
from gradsieve.bench.models import build
from gradsieve.bench.recordings import WARM_STEPS, Recording, record
from gradsieve.comm import lockstep
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.spec import parse
from gradsieve.types import Ctx

COLUMNS = ["model", "world", "density", "scheme", "lost", "sent", "of_target"]
_BITS = 40
_BYTES = 12
"""An element as recorded and as rounded."""


def measure_all(
    models: Sequence[str],
    schemes: Sequence[str],
    world: int,
    density: float,
    steps: int,
    advance: Callable[[float, str], None],
) -> list[dict[str, Any]]:
    rows = []
    for model in models:
        task = build(model)
        for text in schemes:
            parse(text, density).lay([1], world)  # refused now rather than after the recording
        check_fits(world * steps * task.n * _BYTES, f"{model}'s gradients", "lower --world or --steps")
        recording = record(task, world, steps)
        advance(WARM_STEPS + steps, f"{model}: recorded")
        gradients = on_a_grid(recording.gradients)
        for text in schemes:
            figures = measure(parse(text, density), gradients, recording)
            rows.append({"model": model, "world": world, "density": density, "scheme": text, **figures})
            advance(steps, f"{model}: {text}")
    return rows


def on_a_grid(gradients: Tensor) -> Tensor:
    unit = 2.0 ** (math.ceil(math.log2(float(gradients.abs().max()))) - _BITS)
    return gradients.double().div_(unit).round_().mul_(unit)


def measure(scheme: Scheme[Any], gradients: Tensor, recording: Recording) -> dict[str, float]:
    """One scheme over all steps."""
    steps, world, n = gradients.shape
    states = [scheme.lay(recording.sizes, world) for _ in range(world)]
    residuals = torch.zeros(world, n, dtype=torch.float64)
    applied = torch.zeros(n, dtype=torch.float64)
    sent, elements = 0.0, 0
    for step in range(steps):
        residuals += gradients[step]
        outcomes = lockstep.run(
            [scheme.exchange(residuals[rank], states[rank], Ctx(rank, world, step)) for rank in range(world)]
        )
        for rank, outcome in enumerate(outcomes):
            outcome.spent.subtract_from(residuals[rank])
            states[rank] = scheme.settle([outcome.state])[0]
        update = outcomes[0].update
        applied += update.to_dense()
        sent += float(update.values.abs().sum())
        elements += update.count
    missing = gradients.sum((0, 1)) - applied - residuals.sum(0)
    return {
        "lost": float(missing.abs().sum()) / sent if sent else 0.0,
        "sent": sent,
        "of_target": elements / steps / scheme.k(n),
    }
