"""What `attach` is given, without what was put around it; what it cannot be attached to is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsieve import torch_names
from gradsieve.errors import ConfigError
from gradsieve.parallel.hooks import hook_of


def model_in(model: Any) -> Any:
    """What `torch.compile` was given."""
    while isinstance(model, nn.Module) and (inner := torch_names.compiled_from(model)) is not None:
        model = inner
    return model


def ddp_in(model: Any) -> DistributedDataParallel:
    """The DistributedDataParallel in `model`; what a sync cannot be attached to is refused."""
    ddp = model_in(model)
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
    if comm_hook is not None and comm_hook.sync is not None:
        raise ConfigError("a sync is attached to this model already: close() it first")
    return ddp


def refuse_sparse_gradients(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"module {name!r} makes sparse gradients: create it with sparse=False")
