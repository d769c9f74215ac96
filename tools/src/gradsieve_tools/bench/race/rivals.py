"""What others have, in the trainer of examples/gpt: `python -m gradsieve_tools.bench.race.rivals fp16 ...`.

    fp16        torch's hook for DDP
    powersgd    torch's hook for DDP, of rank 2
    local-sgd   torch's post-local SGD: averages models every 10 steps, gradients in the warm-up
    diloco      torchft's own DiLoCo, every 20 steps, with its manager and its gloo

All are what their packages ship. Periods divide the steps from one evaluation to the next: evaluated is a
model that all ranks have.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsieve_tools.bench.race.rules import WARM_UP, trainer
from gradsieve_tools.bench.rivals.names import bucket_cap_mb, torch_hook
from gradsieve_tools.bench.rivals.torchft import Torchft

LOCAL_EVERY, DILOCO_EVERY = 10, 20


class Rival:
    is_preempted = False

    def __init__(self, ddp: DistributedDataParallel, *keep: Any) -> None:
        self._ddp, self._keep = ddp, keep

    def clip_grad_norm_(self, most: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self._ddp.parameters(), most)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def hooked(name: str, ddp: DistributedDataParallel, optimizer: Optimizer) -> Rival:
    found = torch_hook(name)
    assert found is not None  # ATTACH has the names
    ddp.register_comm_hook(*found)
    return Rival(ddp)


def local_sgd(name: str, ddp: DistributedDataParallel, optimizer: Optimizer) -> Rival:
    # The first average comes after WARM_UP steps and not, as with WARM_UP itself, one later.
    begin = WARM_UP - 1
    make: Any = post_localSGD_hook.PostLocalSGDState  # torch has no types for it
    state = make(None, None, begin, post_local_gradient_allreduce=False)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(LOCAL_EVERY, warmup_steps=begin)
    optimizer.register_step_post_hook(lambda *_: averager.average_parameters(ddp.module.parameters()))
    return Rival(ddp)


def diloco(name: str, ddp: DistributedDataParallel, optimizer: Optimizer) -> Rival:
    theirs = Torchft("torchft-diloco", every=DILOCO_EVERY)
    return Rival(ddp, theirs.attach(ddp, optimizer, os.environ["MASTER_ADDR"]))


ATTACH: dict[str, Callable[[str, DistributedDataParallel, Optimizer], Rival]] = {
    "fp16": hooked,
    "powersgd": hooked,
    "local-sgd": local_sgd,
    "diloco": diloco,
}


def main() -> None:
    name, *words = sys.argv[1:]
    sys.path.insert(0, str(trainer().parent))
    train = importlib.import_module("train")
    args = train.parser(__doc__, list(ATTACH)).parse_args([*words, "--sync", name])

    def attach(ddp: DistributedDataParallel, optimizer: Optimizer) -> Rival:
        return ATTACH[name](name, ddp, optimizer)

    train.main(args, attach, bucket_cap_mb=bucket_cap_mb(name))


if __name__ == "__main__":
    main()
