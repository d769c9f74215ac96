"""torchft's own LocalSGD and DiLoCo, with its manager, its lighthouse and its gloo: on real ranks only.

Every rank is a replica group of one. No rank fails here; what is measured is what a training ends with.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.rivals.base import Shapes, all_reduce_bytes, elements
from gradsieve_tools.emulation.stores import store_at

NAMES = ("torchft-local-sgd", "torchft-diloco")
_PATIENCE = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Torchft:
    name: str
    every: int = 50
    rate: float = 0.7
    momentum: float = 0.9  # DiLoCo's outer optimizer with Nesterov's momentum, as in its paper

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"{self.name}: every is a number of steps, from 1 up, not {self.every}")

    def check(self, steps: int) -> None:
        if steps % self.every:
            raise ConfigError(
                f"{self.name} has no exchange at the end: every={self.every} has to divide {steps} steps"
            )

    def bytes_sent(self, shapes: Shapes, world: int, steps: int) -> float:
        return all_reduce_bytes(4 * elements(shapes), world) / self.every

    def attach(self, ddp: DistributedDataParallel, optimizer: Optimizer, master: str = "127.0.0.1") -> Any:
        """`master` is the address of rank 0, which runs the lighthouse. What is returned has to live as long
        as the training."""
        try:
            from torchft.local_sgd import DiLoCo, LocalSGD
        except ImportError as error:
            raise ConfigError(
                f"{self.name} is a package: pip install 'gradsieve[torchft]' ({error})"
            ) from error
        manager, *servers = _managed(master)
        ddp.register_comm_hook(None, debugging_hooks.noop_hook)
        running: Any
        if self.name == "torchft-local-sgd":
            running = LocalSGD(manager, ddp.module, optimizer, self.every)
        else:
            outer = torch.optim.SGD(ddp.parameters(), self.rate, momentum=self.momentum, nesterov=True)
            running = DiLoCo(manager, [ddp.module], optimizer, outer, self.every, pin_memory=False)
        running.__enter__()  # to the end of the process
        return running, servers


def _managed(master: str) -> tuple[Any, ...]:
    """torchft's manager of this rank, and the servers that it needs."""
    from torchft.coordination import LighthouseServer
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    rank, world = dist.get_rank(), dist.get_world_size()
    lighthouse, port = None, torch.zeros(1, dtype=torch.int64, device="cpu")
    if rank == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=world, heartbeat_timeout_ms=60_000)
        port.fill_(urlsplit(lighthouse.address()).port or 0)
    dist.broadcast(port, 0)  # it answers from here on
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
        lighthouse_addr=f"http://{master}:{int(port)}",
        replica_id=f"host_{rank}",
        hostname=here,  # that of the machine is not that of the host
        init_sync=False,  # all start with the same weights
    )
    return manager, store, lighthouse


def _address_towards(host: str) -> str:
    """This host's own, as the others see it. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((host, 9))
        return str(towards.getsockname()[0])
