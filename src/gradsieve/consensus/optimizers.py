"""Whether the optimizers fit: this model, and the other ranks' optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradsieve.errors import ConfigError


def compared(parameters: Mapping[str, Tensor], optimizers: Sequence[Any]) -> dict[str, str]:
    """What has to be the same on all ranks, by name."""
    rates = [str([_rate(group) for group in one.param_groups]) for one in optimizers]
    return {
        "optimizers": " and ".join(
            f"{type(one).__name__} with {_count(parameters, one)} of the model's parameters in "
            f"{len(one.param_groups)} groups"
            for one in optimizers
        ),
        "learning rates": " and ".join(rates),
    }


def refuse(parameters: Mapping[str, Tensor], optimizers: Sequence[Any], rank: int) -> None:
    """Those that would step nothing of this model. On all ranks alike, once they were compared."""
    for place, one in enumerate(optimizers):
        if not _count(parameters, one):
            which = type(one).__name__ if len(optimizers) == 1 else f"{type(one).__name__} (number {place})"
            raise ConfigError(
                f"rank {rank}: {which} has none of the {len(parameters)} parameters of this model that are "
                "trained: make it of model.parameters(), after the model was replaced or moved for the last "
                "time, and give attach() only optimizers that step this model"
            )


def uncovered(parameters: Mapping[str, Tensor], optimizers: Sequence[Any]) -> list[str]:
    """Parameters that none of these has."""
    covered = {each for one in optimizers for group in one.param_groups for each in group["params"]}
    return [name for name, parameter in parameters.items() if parameter not in covered]


def _count(parameters: Mapping[str, Tensor], optimizer: Any) -> int:
    own = {id(each) for each in parameters.values()}
    return sum(id(each) in own for group in optimizer.param_groups for each in group["params"])


def _rate(group: Mapping[str, Any]) -> float | None:
    """A rate may be a tensor."""
    return None if group.get("lr") is None else float(group["lr"])
