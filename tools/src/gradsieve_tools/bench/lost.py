"""`gradsieve bench lost`: the gradient that a scheme loses over a training, to the last bit.

Recorded gradients are rounded to multiples of one power of two, 2^-40 of the largest element, and exchanged
in float64: then no sum over ranks and steps rounds, and what is missing is the scheme's doing alone.

    lost = |all gradients - all updates - all residuals| over |all updates|, as sums of magnitudes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gradsieve.schemes import Scheme
from gradsieve_tools.bench.common.machine import check_fits, one_thread
from gradsieve_tools.bench.common.models import build
from gradsieve_tools.bench.common.recordings import Recording, record
from gradsieve_tools.bench.schemes.measure import Fleet
from gradsieve_tools.specs import parse

COLUMNS = ["model", "world", "density", "scheme", "lost", "sent", "of_target"]
_BITS = 40
_BYTES = 12  # bytes of an element as recorded and as rounded


def measure_all(
    models: Sequence[str],
    schemes: Sequence[str],
    world: int,
    density: float,
    steps: int,
    advance: Callable[[float, str], None],
) -> list[dict[str, Any]]:
    for text in schemes:
        parse(text, density).init_state([1], world)  # refused now rather than after the recording
    rows = []
    for model in models:
        task = build(model)
        check_fits(world * steps * task.n * _BYTES, f"{model}'s gradients", "lower --world or --steps")
        with one_thread():
            recording = on_a_grid(record(task, world, steps, after_step=partial(_tell, model, advance)))
            for text in schemes:
                figures = measure(parse(text, density), recording)
                rows.append({"model": model, "world": world, "density": density, "scheme": text, **figures})
                advance(steps, f"{model}: {text}")
    return rows


def _tell(model: str, advance: Callable[[float, str], None], taken: int) -> None:
    advance(1, f"{model}: recording, step {taken}")


def on_a_grid(recording: Recording) -> Recording:
    largest = float(recording.gradients.abs().max())
    unit = 2.0 ** (math.ceil(math.log2(largest)) - _BITS)
    return replace(recording, gradients=recording.gradients.double().div_(unit).round_().mul_(unit))


def measure(scheme: Scheme[Any], recording: Recording) -> dict[str, float]:
    """Run a scheme over all steps, every rank recorded, and return its row."""
    steps, world, _ = recording.gradients.shape
    fleet = Fleet(scheme, recording, world, scheme.density)
    of_target = sum(fleet.step().of_target for _ in range(steps)) / steps
    missing = float(fleet.missing().abs().sum())
    return {"lost": missing / fleet.sent if fleet.sent else 0.0, "sent": fleet.sent, "of_target": of_target}
