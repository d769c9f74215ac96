"""What a sync says in the log when it begins and ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradsieve import kernels
from gradsieve.integrations.optimizers import uncovered
from gradsieve.sync import Pipeline, StepPipeline
from gradsieve.sync.budget import Fixed

_log = logging.getLogger("gradsieve")


def what_is_set(pipeline: Pipeline, parameters: Mapping[str, Tensor], optimizers: Sequence[Any]) -> None:
    missing = uncovered(parameters, optimizers)
    if missing:
        some = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        _log.warning(
            "rank %d: no optimizer given to gradsieve has %d of %d parameters (%s). If another one steps "
            "them, give both: attach(ddp, [first, second])",
            pipeline.rank,
            len(missing),
            len(parameters),
            some,
        )
    if pipeline.rank == 0:
        _log.info(
            "%s %s among %d ranks for %s: %s; kernels: %s",
            type(pipeline.scheme).__name__,
            _amount(pipeline),
            pipeline.world,
            " and ".join(type(one).__name__ for one in optimizers),
            pipeline.treatment.describe(),
            kernels.active(),
        )


def _amount(pipeline: Pipeline) -> str:
    if pipeline.budget is None:
        return f"at density {pipeline.scheme.density:g}"
    if isinstance(pipeline.budget, Fixed):
        return f"with {pipeline.budget.bits:g} bits a parameter and step"
    return "with as many bits as forward and backward hide"


def what_is_left(pipeline: StepPipeline) -> None:
    left = pipeline.waiting_norm()
    if left:
        _log.warning(
            "rank %d, step %d: close() leaves steps of norm %.3g behind that were not exchanged and are not "
            "in the model: call flush() before it, on all ranks",
            pipeline.rank,
            pipeline.step,
            left,
        )
