"""Optimizers' states made the same on all ranks, for those who go on without a sync that exchanges steps.

Each rank's optimizer has moments of its own. Plain DDP gives all ranks the same gradient, and with different
moments they would still take different steps. Moments are averaged, which is what a dense training would have
held up to the noise of batches; what cannot be averaged (step counts, quantised moments) is rank 0's.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve.torch_names import all_gather_flat, plain_part_of

_log = logging.getLogger("gradsieve")


def make_equal(
    optimizers: Sequence[Any],
    names: Mapping[int, str],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """States of the parameters with these names, by id. Call it on all ranks of the group."""
    world = dist.get_world_size(group)
    states = list(_states(optimizers, names))
    layout = repr([(place, _kinds(state)) for place, state in states])
    if not _is_alike(layout, world, group, device):
        _log.warning(
            "optimizers' states are of different kinds on different ranks, so that they were not averaged: "
            "replicas will drift apart. Load one optimizer state on all ranks, or make a new optimizer"
        )
        return
    for _, state in states:
        averages = all(each.is_floating_point() for each in _tensors(state) if each.numel() > 1)
        for key in sorted(state):
            _make_one_equal(state, key, averages, world, group, device)


def _states(
    optimizers: Sequence[Any], names: Mapping[int, str]
) -> Iterator[tuple[tuple[int, str], dict[str, Any]]]:
    for number, one in enumerate(optimizers):
        ours = {names[id(each)]: state for each, state in one.state.items() if id(each) in names}
        for name in sorted(ours):
            yield (number, name), ours[name]


def _tensors(state: Mapping[str, Any]) -> list[Tensor]:
    return [plain_part_of(each) for each in state.values() if isinstance(each, Tensor)]


def _kinds(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    def kind(each: Any) -> str:
        if not isinstance(each, Tensor):
            return type(each).__name__
        return f"{each.dtype} {tuple(plain_part_of(each).shape)}"

    return sorted((key, kind(each)) for key, each in state.items())


def _is_alike(layout: str, world: int, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    number = hashlib.blake2b(layout.encode(), digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(number, "little", signed=True)], dtype=torch.int64, device=device)
    everyone = mine.new_empty(world)
    all_gather_flat(everyone, mine, group)
    return bool((everyone == mine).all())


def _make_one_equal(
    state: dict[str, Any],
    key: str,
    averages: bool,
    world: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    found = state[key]
    if isinstance(found, int | float):
        number = torch.tensor([float(found)], dtype=torch.float64, device=device)
        dist.broadcast(number, group_src=0, group=group)
        state[key] = type(found)(number.item())
    if not isinstance(found, Tensor) or not found.numel():
        return
    part = plain_part_of(found)
    if averages and part.numel() > 1:
        wide = part.to(device, torch.promote_types(part.dtype, torch.float32), copy=True)
        dist.all_reduce(wide, group=group)
        part.copy_(wide.div_(world))
    else:
        copy = part.to(device, copy=True).contiguous()
        dist.broadcast(copy, group_src=0, group=group)
        part.copy_(copy)
