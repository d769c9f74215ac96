"""A rank: it reads requests from its input and answers them, one JSON line each."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradsieve.errors import ConfigError
from gradsieve_tools.doctor.self_test import kernels, trainings
from gradsieve_tools.doctor.self_test.trainings import Here

TIMEOUT = timedelta(seconds=30)  # of the process groups
_LONGEST = 400
_FRAMES = 3

REQUESTS: Mapping[str, Callable[..., Any]] = {
    "device": kernels.describe,
    "kernels": kernels.compare,
    "bandwidth": kernels.measure,
    "plain": trainings.plain,
    "training": trainings.training,
    "memory": trainings.memory,
    "death": trainings.death,
    "batch norm": trainings.batch_norm,
    "budget": trainings.budget,
}


def main() -> None:
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what a library prints does not get into an answer
        for line in sys.stdin:
            print(json.dumps(_answer(rank, json.loads(line))), file=answers, flush=True)


def _answer(rank: int, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        device, world = _device(request["settings"].pop("device"), rank), request["world"]
        store = dist.FileStore(request["store"], world)
        if world > 1:
            dist.init_process_group(
                _backend(device, world), store=store, rank=rank, world_size=world, timeout=TIMEOUT
            )
        return {"value": REQUESTS[request["what"]](Here(rank, device, store), **request["settings"])}
    except Exception as error:
        return {"error": _words(error)}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _device(name: str, rank: int) -> torch.device:
    """Return each rank its own one where there are enough."""
    if not name:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        name = "cpu" if found is None else found.type
    if torch.device(name).type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(name)
    if not (count := module.device_count()):
        raise ConfigError(f"there is no {name} device here, by this torch")
    device = torch.device(torch.device(name).type, rank % count)
    module.set_device(device.index)
    return device


def _backend(device: torch.device, world: int) -> str:
    """Return the usual backend; but NCCL refuses two ranks on one device, and gloo takes CUDA's tensors."""
    if device.type == "cuda" and torch.accelerator.device_count() < world:
        return "gloo"
    return dist.get_default_backend_for_device(device.type)


def _words(error: Exception) -> str:
    """Return what and where, without the paths of this machine."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    where = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    inner = getattr(error, "errors", [])  # of torch's sanitizer: each with its kernels and streams
    said = " ".join(word for each in [error, *inner[:1]] for word in str(each).split())
    return f"{type(error).__name__}: {said[:_LONGEST]} ({where})"


if __name__ == "__main__":
    main()
