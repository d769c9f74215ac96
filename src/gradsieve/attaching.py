"""`gradsieve.attach`: one call for DistributedDataParallel and for FSDP2.

The module is not called `attach`: importing it would put a module where the package has the function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from gradsieve import torch_names
from gradsieve.errors import ConfigError
from gradsieve.hooks import hook_of
from gradsieve.parallel.ddp import DdpSync
from gradsieve.pipeline.exchange_settings import Exchange
from gradsieve.schemes.base import Scheme

if TYPE_CHECKING:
    from gradsieve.parallel.hsdp import HsdpSync


class Settings(TypedDict, total=False):
    scheme: str | Scheme[Any] | None
    density: float | None
    bits: float | None
    exchange: Exchange | None
    scaler: torch.amp.GradScaler | None


@overload
def attach(
    model: DistributedDataParallel, optimizer: Any, *, replicate: None = None, **settings: Unpack[Settings]
) -> DdpSync: ...


@overload
def attach(
    model: Any, optimizer: Any, *, replicate: DeviceMesh, **settings: Unpack[Settings]
) -> HsdpSync: ...


def attach(
    model: Any,
    optimizer: Any,
    *,
    replicate: DeviceMesh | None = None,
    scheme: str | Scheme[Any] | None = None,
    density: float | None = None,
    bits: float | None = None,
    exchange: Exchange | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> DdpSync | HsdpSync:
    """Replace DDP's dense all-reduce by an exchange of few bits that backward hides.

    Call it on all ranks, after wrapping the model and before the first backward. Evaluate and save as ever:
    the parameters hold the model that all ranks share, the same bits on each of them, except while a training
    forward of the model, a backward pass or a step of its optimizer is running. At the end of a training call
    `flush()` on all ranks.

    Args:
        model: In `DistributedDataParallel`. With `replicate`, a model that was given to
            `fully_shard(model, mesh=mesh["shard"])`. What `torch.compile` put around it is taken off.
        optimizer: The one that steps the model, or a list of several.
        replicate: The axis of the mesh over which shards are exchanged; FSDP averages over the other one.
        scheme: A name ("exdyna", "topk", ...) or an object such as `gradsieve.schemes.ExDyna(density=0.01)`.
            Without scheme, density and bits, all elements are sent in round robin, in a few bits each: as
            many as this number of ranks needs, or as a step carries where that is less. The first 8 exchanges
            are timed; then the choice is logged, kept in checkpoints, and fixed. A published scheme
            ("exdyna-paper", ...) has the rules of its paper over the whole model at once, and brings the
            settings of its exchange along.
        density: Share of the elements to send in a step. Alone, it is ExDyna's.
        bits: The budget a parameter and step, from the first step on: for a run that is to be the same bits
            each time it is repeated. With `gradsieve.Gradients()` 8 or more: all gradients are
            sent in every step, in 4 bits there and 4 back.
        exchange: `gradsieve.Steps(...)`: every rank steps its own model, and what the steps moved is
            exchanged; the default. Or `gradsieve.Gradients(...)`: gradients are, before the optimizer sees
            them.
        scaler: The `GradScaler`, needed only where gradients are exchanged: residuals then follow its scale.

    Returns:
        A `GradientSync`.

    Raises:
        ConfigError: A setting that cannot work, or a model or optimizer that it cannot be attached to.
        MismatchError: Ranks gave different settings.
        DivergenceError: Ranks have different weights.
    """
    settings = Settings(scheme=scheme, density=density, bits=bits, exchange=exchange, scaler=scaler)
    if replicate is None:
        return DdpSync(ddp_in(model), optimizer, **settings)
    from gradsieve.parallel.hsdp import HsdpSync  # FSDP takes two seconds to import

    return HsdpSync(torch_names.without_compile(model), optimizer, replicate, **settings)


def ddp_in(model: Any) -> DistributedDataParallel:
    """The DistributedDataParallel in `model`; a model that no sync can be attached to is refused."""
    ddp = torch_names.without_compile(model)
    if type(ddp).__name__.startswith("FSDP"):
        raise ConfigError(
            "this model is sharded: give the axis that hosts are exchanged over, "
            "attach(model, optimizer, replicate=mesh['replicate']), as docs/hsdp.md says"
        )
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(
            f"attach() wants a DistributedDataParallel model, not {type(ddp).__name__}: wrap it first, "
            "ddp = DistributedDataParallel(model), and then attach(ddp, optimizer). Accelerate and Trainer "
            "wrap none in a single process: start several, with torchrun. Nor does a Trainer whose "
            "evaluate() came before its train(): call it after"
        )
    if torch_names.hands_over_no_buckets(ddp):
        raise ConfigError(
            'with torch._dynamo.config.optimize_ddp = "python_reducer" DDP hands over no buckets: set it to '
            "True before the model is wrapped"
        )
    refuse_sparse_gradients(ddp.module)
    comm_hook = hook_of(ddp)
    if comm_hook is not None and comm_hook.hand_over is not None:
        raise ConfigError("a sync is attached to this model already: close() it first")
    return ddp


def refuse_sparse_gradients(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"module {name!r} makes sparse gradients: create it with sparse=False")
