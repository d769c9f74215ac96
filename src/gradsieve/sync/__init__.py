"""A rank's pipeline: what happens around a scheme in every step, and what is remembered between steps."""

from gradsieve.sync.base import UNIT_CAP_MB, Pipeline
from gradsieve.sync.gradients import GradientPipeline
from gradsieve.sync.steps import StepPipeline

__all__ = ["UNIT_CAP_MB", "GradientPipeline", "Pipeline", "StepPipeline"]
