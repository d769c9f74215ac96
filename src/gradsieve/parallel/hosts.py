"""A mesh of all ranks, host by host."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradsieve.errors import ConfigError
from gradsieve.ranks_alike import as_bytes, as_text
from gradsieve.torch_names import all_gather_flat


def host_mesh(device_type: str = "cuda") -> DeviceMesh:
    """All ranks as a mesh with the axes "replicate", from host to host, and "shard", inside a host. Call it
    on all ranks. Ranks share a host if its name and, under torchrun, the number of their node are the same.
    """
    if not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialised: call init_process_group() first")
    here = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"
    device = torch.device("cpu") if device_type == "cpu" else torch.accelerator.current_accelerator()
    mine = as_bytes(here, device or torch.device("cpu"))
    rows = mine.new_empty((dist.get_world_size(), mine.numel()))
    all_gather_flat(rows.view(-1), mine, None)
    return DeviceMesh(
        device_type, by_host([as_text(row) for row in rows]), mesh_dim_names=("replicate", "shard")
    )


def by_host(names: list[str]) -> list[list[int]]:
    """Ranks in their order, a row a host."""
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    if len({len(ranks) for ranks in hosts.values()}) > 1:
        some = ", ".join(f"{name.rstrip('/')} {len(ranks)}" for name, ranks in list(hosts.items())[:4])
        raise ConfigError(
            f"hosts have different numbers of ranks ({some}), so that some shards would be on one host only: "
            "start as many on each"
        )
    return list(hosts.values())
