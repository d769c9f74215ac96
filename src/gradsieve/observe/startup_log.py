"""What a sync says in the log when it begins and ends."""

from __future__ import annotations

import logging
import os

from gradsieve import kernels
from gradsieve.consensus.optimizers import uncovered
from gradsieve.pipeline import Pipeline, StepPipeline
from gradsieve.pipeline.budget import Fixed, cost
from gradsieve.replica.replica import Replica

_log = logging.getLogger("gradsieve")


def report_settings(replica: Replica) -> None:
    """Also what is set and can hardly be meant."""
    pipeline, parameters, optimizers = replica.pipeline, replica.held, replica.optimizers
    _warn_of_odd_settings(replica)
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
            pipeline.settings.describe(),
            kernels.active(),
        )


def _warn_of_odd_settings(replica: Replica) -> None:
    pipeline, world, every = replica.pipeline, replica.world, replica.settings.every
    if pipeline.rank != 0 or replica.scheme.no_comm or replica.is_elastic:
        return
    if world == 1:
        _log.warning(
            "rank 0: there is one rank, and nothing to exchange: the optimizer steps as without gradsieve. "
            "Start several, with torchrun"
        )
        return
    exact = cost("exact", world) / every
    if isinstance(pipeline.budget, Fixed) and pipeline.budget.bits > exact:
        _log.warning(
            "rank 0: bits=%g is more than the %.3g bits a parameter and step with which %d ranks send "
            "everything as it is: it is what plain DistributedDataParallel sends. Give less, such as "
            "bits=0.75",
            pipeline.budget.bits,
            exact,
            world,
        )
    density = replica.scheme.density
    if pipeline.budget is None and density * pipeline.parameters < 1:
        _log.warning(
            "rank 0: density=%g of %d parameters is less than one element a step, and one is the least that "
            "is sent: give density=%.1g or more, or bits=0.75",
            density,
            pipeline.parameters,
            1 / pipeline.parameters,
        )
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not replica.part and here.isdecimal() and 1 < int(here) < world:
        _log.warning(
            "rank 0: each of the %s ranks of a host sends over the network by itself. Average inside the "
            "host first, and exchange once a host: docs/hsdp.md",
            here,
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and _may_restart():
        _log.warning(
            "rank 0: torchrun has one store for all its restarts, and ranks that it starts again would look "
            "there for the dead until the time-out: start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in "
            "its environment, docs/checkpoints.md"
        )


def _may_restart() -> bool:
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _amount(pipeline: Pipeline) -> str:
    if pipeline.budget is None:
        return f"at density {pipeline.scheme.density:g}"
    if isinstance(pipeline.budget, Fixed):
        return f"with {pipeline.budget.bits:g} bits a parameter and step"
    return "with as many bits as forward and backward hide"


def warn_of_lost_steps(pipeline: StepPipeline) -> None:
    """Python ends by itself, and `flush()` was forgotten. No rank is asked."""
    left = pipeline.waiting_norm()
    if left:
        _log.warning(
            "rank %d, step %d: the training ended with steps of norm %.3g that no exchange has carried; the "
            "model lacks them: call sync.flush() on all ranks at the end",
            pipeline.rank,
            pipeline.step,
            left,
        )


def warn_of_residual(pipeline: StepPipeline) -> None:
    """`close()` came before `flush()`."""
    left = pipeline.waiting_norm()
    if left:
        _log.warning(
            "rank %d, step %d: close() leaves steps of norm %.3g behind that were not exchanged and are not "
            "in the model: call flush() before it, on all ranks",
            pipeline.rank,
            pipeline.step,
            left,
        )
