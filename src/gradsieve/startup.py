"""Lines of the log when a sync is attached, and if a training ends with residuals that were never sent."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from gradsieve import kernels, version
from gradsieve.pipeline import Pipeline
from gradsieve.ranks_alike import uncovered
from gradsieve.replica import Replica
from gradsieve.schemes.stripes import cost

_log = logging.getLogger("gradsieve")


def report_settings(replica: Replica) -> None:
    """Log one line on rank 0 that repeats this attach(), and warnings of suspicious settings.

    If no logging is set up, Python drops what is below a warning: the line goes to stderr then.
    """
    if replica.rank == 0:
        for odd in _odd_settings(replica):
            _log.warning("rank 0: %s", odd)
        _log.info("%s", line := _call(replica))
        if not _log.hasHandlers():
            print(line, file=sys.stderr)


def _call(replica: Replica) -> str:
    optimizers = " and ".join(type(optimizer).__name__ for optimizer in replica.optimizers)
    budget = replica.pipeline.budget
    if budget is None:
        sent = f"scheme={_made(replica.scheme)}"
    elif replica.fixed is not None:
        sent = f"bits={budget.bits:g}"
    else:
        sent = "as many bits as quality needs and a step carries: the choice is logged"
    return (
        f"gradsieve {version.VERSION} among {replica.world} ranks, {kernels.active()} kernels: "
        f"attach(model, {optimizers}, {sent}, exchange={_made(replica.settings)})"
    )


def _made(settings: Any) -> str:
    """Return the call that makes these settings."""
    return f"{type(settings).__name__}({', '.join(f'{k}={v!r}' for k, v in changed(settings).items())})"


def changed(settings: Any) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    values = [(field, getattr(settings, field.name)) for field in fields(settings)]
    return {field.name: value for field, value in values if value != field.default}


def _odd_settings(replica: Replica) -> Iterator[str]:
    pipeline, world, parameters = replica.pipeline, replica.world, replica.pipeline.elements
    if missing := uncovered(replica.held, replica.optimizers):
        some = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        yield (
            f"no optimizer given to gradsieve has {len(missing)} of {len(replica.held)} parameters ({some}). "
            "If another one steps them, give both: attach(ddp, [first, second])"
        )
    if replica.scheme.no_comm or replica.is_elastic:
        return
    if world == 1:
        yield (
            "there is one rank, and nothing to exchange: the optimizer steps as without gradsieve. Start "
            "several, with torchrun"
        )
        return
    exact = cost("exact", world) / replica.settings.every
    if replica.fixed is not None and replica.fixed.bits > exact:
        yield (
            f"bits={replica.fixed.bits:g} is more than the {exact:.3g} bits a parameter and step with "
            f"which {world} ranks send everything as it is: it is what plain DistributedDataParallel sends. "
            "Give less, such as bits=0.75"
        )
    density = replica.scheme.density
    if pipeline.budget is None and density * parameters < 1:
        yield (
            f"density={density:g} of {parameters} parameters is less than one element a step, and one is the "
            f"least that is sent: give density={1 / parameters:.1g} or more, or bits=0.75"
        )
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not replica.part and here.isdecimal() and 1 < int(here) < world:
        yield (
            f"each of the {here} ranks of a host sends over the network by itself. Average inside the host "
            "first, and exchange once a host: docs/hsdp.md"
        )
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shares_store and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        yield (
            "torchrun has one store for all its restarts, and ranks that it starts again would hang until "
            "the time-out: start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, "
            "docs/checkpoints.md"
        )


def warn_of_residual(pipeline: Pipeline, event: str) -> None:
    """Warn without asking other ranks: this rank may end alone."""
    left = pipeline.residual_norm()
    if left:
        _log.warning(
            "rank %d, step %d: %s with steps of norm %.3g that were never exchanged and are not in the "
            "model: call flush() before that, on all ranks",
            pipeline.rank,
            pipeline.step,
            event,
            left,
        )
