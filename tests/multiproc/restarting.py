"""examples/restarts.py for torchrun, with kernels that are loaded at once.

With `--by-count` in the way that was recommended before: one store for all lives of the training, in front
of its keys the number of this agent's restarts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from gradsieve import kernels

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import restarts

_initialise = dist.init_process_group


def by_count(*_: Any, **__: Any) -> None:
    with mock.patch.dict(os.environ, TORCHELASTIC_USE_AGENT_STORE="True"):
        store, rank, world = next(dist.rendezvous("env://"))
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    prefixed = dist.PrefixStore(count, store)
    print(f"rank {rank}, restart {count}", flush=True)
    _initialise("gloo", store=prefixed, rank=rank, world_size=world, timeout=timedelta(seconds=3))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--by-count", action="store_true")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        stack.enter_context(kernels.using("torch"))
        if args.by_count:
            stack.enter_context(mock.patch.dict(os.environ, TORCHELASTIC_USE_AGENT_STORE="unsaid"))
            stack.enter_context(mock.patch.object(dist, "init_process_group", by_count))
        words = restarts.main(args.run, steps=args.steps, step_seconds=0.05)
    print(f"rank {os.environ['RANK']}: {words}", flush=True)


if __name__ == "__main__":
    main()
