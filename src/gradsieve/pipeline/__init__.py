"""A rank's pipeline: what happens around a scheme in every step, and what is remembered between steps."""

from gradsieve.pipeline.base import UNIT_CAP_MB, Pipeline
from gradsieve.pipeline.gradients import GradientPipeline
from gradsieve.pipeline.steps import StepPipeline

__all__ = ["UNIT_CAP_MB", "GradientPipeline", "Pipeline", "StepPipeline"]
