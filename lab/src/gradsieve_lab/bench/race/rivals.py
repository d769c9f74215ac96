"""What others have, in the trainer of examples/gpt: `python -m gradsieve_lab.bench.race.rivals fp16 ...`.

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
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsieve.errors import ConfigError
from gradsieve_lab.bench.race.rules import WARM_UP, trainer
from gradsieve_lab.bench.rivals.names import bucket_cap_mb, torch_hook
from gradsieve_lab.emulation.stores import store_at

LOCAL_EVERY, DILOCO_EVERY = 10, 20
_OUTER_RATE, _OUTER_MOMENTUM = 0.7, 0.9
"""Of DiLoCo's outer optimizer, with Nesterov's momentum, as its paper found them."""
_LIGHTHOUSE_PORT = 29510
_PATIENCE = timedelta(minutes=5)


class Rival:
    """What the loop asks of a sync. Nothing is pending between two of its steps."""

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
    try:
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo
    except ImportError as error:
        raise ConfigError(f"diloco is torchft's: pip install 'gradsieve[torchft]' ({error})") from error
    rank, world, master = dist.get_rank(), dist.get_world_size(), os.environ["MASTER_ADDR"]
    lighthouse = None
    if rank == 0:
        lighthouse = LighthouseServer(
            bind=f"[::]:{_LIGHTHOUSE_PORT}", min_replicas=world, heartbeat_timeout_ms=60_000
        )
    dist.barrier()  # it answers from here on
    here = _address_towards(master)
    store = store_at(here)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_PATIENCE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=world,
        use_async_quorum=False,
        timeout=_PATIENCE,
        quorum_timeout=_PATIENCE,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        lighthouse_addr=f"http://{master}:{_LIGHTHOUSE_PORT}",
        replica_id=f"host_{rank}",
        hostname=here,  # that of the machine is not that of the host
        init_sync=False,  # all start with the same weights
    )
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    outer = torch.optim.SGD(ddp.parameters(), _OUTER_RATE, momentum=_OUTER_MOMENTUM, nesterov=True)
    running = DiLoCo(manager, [ddp.module], optimizer, outer, DILOCO_EVERY, pin_memory=False)
    running.__enter__()  # to the end of the process
    return Rival(ddp, running, store, lighthouse)


def _address_towards(host: str) -> str:
    """This host's own, as the others see it. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((host, 9))
        return str(towards.getsockname()[0])


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
