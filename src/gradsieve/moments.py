"""Optimizers' states made the same on all ranks, for a training that goes on without exchanging steps.

Each rank's optimizer has moments of its own. Plain DDP gives all ranks the same gradient, and with different
moments they would still take different steps. Moments are averaged, as a dense training would have them up to
the noise of batches; what cannot be averaged (step counts, quantised moments) is taken from rank 0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.ranks_alike import hash_of
from gradsieve.torch_names import all_gather_flat, plain_part_of

_log = logging.getLogger("gradsieve")


def make_equal(
    optimizers: Sequence[Any],
    names: Mapping[int, str],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Make the states of these parameters, given by id, the same. Call it on all ranks of the group."""
    states = list(_states(optimizers, names))
    layout = hash_of(repr([(place, _kinds(state)) for place, state in states]))
    mine = torch.tensor([layout], dtype=torch.int64, device=device)
    everyone = mine.new_empty(dist.get_world_size(group))
    all_gather_flat(everyone, mine, group)
    if not bool((everyone == mine).all()):
        _log.warning(
            "optimizers' states are of different kinds on different ranks, so that they were not averaged: "
            "replicas will drift apart. Load one optimizer state on all ranks, or make a new optimizer"
        )
        return
    for _, state in states:
        tensors = [plain_part_of(value) for value in state.values() if isinstance(value, Tensor)]
        averages = all(tensor.is_floating_point() for tensor in tensors if tensor.numel() > 1)
        for key, value in sorted(state.items()):
            if isinstance(value, Tensor):
                _share(plain_part_of(value), averages, group, device)
            elif isinstance(value, int | float):
                number = torch.tensor(float(value), dtype=torch.float64, device=device)
                _share(number, False, group, device)
                state[key] = type(value)(number.item())


def _states(
    optimizers: Sequence[Any], names: Mapping[int, str]
) -> Iterator[tuple[tuple[int, str], dict[str, Any]]]:
    for number, optimizer in enumerate(optimizers):
        ours = {names[id(p)]: state for p, state in optimizer.state.items() if id(p) in names}
        for name in sorted(ours):
            yield (number, name), ours[name]


def _kinds(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    def kind(value: Any) -> str:
        if not isinstance(value, Tensor):
            return type(value).__name__
        return f"{value.dtype} {tuple(plain_part_of(value).shape)}"

    return sorted((key, kind(value)) for key, value in state.items())


def _share(part: Tensor, averages: bool, group: dist.ProcessGroup | None, device: torch.device) -> None:
    if averages and part.numel() > 1:
        wide = part.to(device, torch.promote_types(part.dtype, torch.float32), copy=True)
        dist.all_reduce(wide, group=group)
        part.copy_(wide.div_(dist.get_world_size(group)))
    elif part.numel():
        copy = part.to(device, copy=True).contiguous()
        dist.broadcast(copy, group_src=0, group=group)
        part.copy_(copy)
