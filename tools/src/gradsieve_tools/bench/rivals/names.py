"""What schemes are measured against on real ranks: torch's own communication hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

RIVALS = ("fp16", "powersgd")

POWERSGD_RANK = 2
POWERSGD_FROM = 2  # steps in which it sends all, at least this many: DDP rebuilds its buckets after the first
_ONE_BUCKET_MB = 1e4


def torch_hook(sync: str, rank: int = POWERSGD_RANK) -> tuple[Any, Callable[[Any, Any], Any]] | None:
    """State and hook, as `register_comm_hook` takes them; None for what torch does not have."""
    if sync == "dense":  # torch's own all-reduce and not our scheme of that name: it is what people run
        return None, default_hooks.allreduce_hook
    if sync == "fp16":
        return None, default_hooks.fp16_compress_hook
    if sync == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_FROM
        )
        return state, powerSGD_hook.powerSGD_hook
    return None


def bucket_cap_mb(sync: str) -> float | None:
    """Return DDP's bucket size: torch's PowerSGD mismatches collectives on gloo with several buckets."""
    return _ONE_BUCKET_MB if sync == "powersgd" else None


def buffers_stay() -> dict[str, Any]:
    """DDP's setting that lets each rank keep its buffers, by the name that it has from torch 2.13 on where
    there is one."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers"
    return {name if name in known else "broadcast_buffers": False}
