"""A rank's exchange: what happens around a scheme in every step, and what is remembered between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradsieve.models import Models
from gradsieve.pipeline.base import UNIT_CAP_MB, MakeModels, Pending, Pipeline
from gradsieve.pipeline.exchange_settings import Exchange, Gradients, Steps
from gradsieve.pipeline.steps import StepPipeline
from gradsieve.schemes.base import Scheme

__all__ = ["UNIT_CAP_MB", "Pending", "Pipeline", "StepPipeline", "make_pipeline"]


def make_pipeline(
    parameters: Mapping[str, Tensor],
    optimizers: Sequence[Any],
    scheme: Scheme[Any],
    settings: Exchange,
    rank: int,
    world: int,
    bucket_cap_mb: float = UNIT_CAP_MB,
    models: MakeModels = Models,
) -> Pipeline:
    """Return the exchange that these settings ask for. A lossless scheme leaves nothing behind: its steps are
    exchanged several at a time."""
    if isinstance(settings, Steps) and (settings.every > 1 or not scheme.lossless):
        return StepPipeline(parameters, optimizers, scheme, settings, rank, world, bucket_cap_mb, models)
    from gradsieve.pipeline.gradients import GradientPipeline  # most trainings exchange steps

    plain = settings if isinstance(settings, Gradients) else Gradients()
    return GradientPipeline(parameters, optimizers, scheme, plain, rank, world, bucket_cap_mb)
