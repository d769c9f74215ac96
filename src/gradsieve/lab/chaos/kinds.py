"""What can happen to a rank, to what it sends, or to what it stands on; and what must come of it.

Everything is done by the rank to whom it happens, at an op, so that it can be repeated.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from gradsieve.comm.ops import AllReduce, Op
from gradsieve.errors import LabError
from gradsieve.lab import tools
from gradsieve.lab.chaos.ground import FULL, cpu_group
from gradsieve.lab.faults.kinds import KINDS as ENDINGS
from gradsieve.lab.faults.kinds import STOP, strike

BATCH_BYTES = 1 << 26
"""What a rank takes for every batch, and does not touch."""
_LEFT_BYTES = 1 << 23
"""What a memory cap leaves beyond what is taken already."""
_SLOW_RATE = "2mbit"


class Must(Enum):
    """What has to come of a fault."""

    DEATH = "all others name the rank within 6 s"
    FAIL = "the rank fails by itself, all others name it within 6 s"
    STALL = "all others name the rank within the deadline and 1 s"
    CUT = "all ranks raise within the deadline and 1 s, and name nobody who lives"
    GO_ON = "nothing: the training goes on, bit for bit"
    DAMAGE = "all ranks raise, or nothing comes of it; nothing wrong is applied"
    DISK = "all ranks refuse to save, and the checkpoint before is whole"


class Needs(Enum):
    """Of the machine."""

    NOTHING = "nothing"
    LINKS = "network namespaces"
    DISK = "a tmpfs, for which root is needed"
    PROCESSOR = "a cgroup of version 1 with cpu quotas, for which root is needed"


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a fault happens."""

    rank: int
    world: int
    folder: Path
    bit: int
    """Of a payload, before it is taken modulo its length."""
    earlier: dict[tuple[object, ...], Tensor]
    """The last payload of each form that this rank sent."""


Strike = Callable[[Op, Scene], Op | None]
"""Let it happen; the op that is performed then. None: it cannot happen to this op, wait for the next."""


class BrokenOffError(RuntimeError):
    """A connection ended in the middle of a message."""


@dataclass(frozen=True, slots=True)
class Kind:
    must: Must
    strike: Strike
    needs: Needs = Needs.NOTHING
    last_step: int = 3
    """Of an episode, in which it may begin and still have its effect; it may slip to the step after."""
    first_step: int = -1
    """-1 is loading."""
    any_time: bool = False
    """It may also happen at a time between ops."""


def form(op: Op) -> tuple[object, ...]:
    return type(op), op.tensor.shape, op.tensor.dtype


def _ends(kind: str) -> Strike:
    def happen(op: Op, scene: Scene) -> Op:
        strike(kind)
        return op

    return happen


def flipped(op: Op, scene: Scene) -> Op | None:
    """But for what the backend adds up itself: nobody can check that (`sync/ledger.py`)."""
    if not op.tensor.numel() or isinstance(op, AllReduce):
        return None
    content = op.tensor.contiguous().clone()
    octets = content.view(-1).view(torch.uint8)
    place = scene.bit % (8 * octets.numel())
    octets[place // 8] ^= 1 << place % 8
    return replace(op, tensor=content)


def replayed(op: Op, scene: Scene) -> Op | None:
    """What was sent last in the same form, if that was something else."""
    before = scene.earlier.get(form(op))
    if before is None or isinstance(op, AllReduce) or torch.equal(before, op.tensor):
        return None
    return replace(op, tensor=before.clone())


def truncated(op: Op, scene: Scene) -> Op | None:
    """Its second half is not sent any more: the connections end. `rank.py` does it."""
    return op if op.tensor.numel() > 1 else None


def _full_disk(op: Op, scene: Scene) -> Op:
    with (scene.folder / FULL).open("wb", buffering=0) as ballast:
        size = 1 << 16
        while size:
            try:
                ballast.write(bytes(size))
            except OSError:
                size //= 2
    return op


def _memory_cap(op: Op, scene: Scene) -> Op:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    cap = pages * os.sysconf("SC_PAGESIZE") + _LEFT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (cap, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return op


def _slow_processor(op: Op, scene: Scene) -> Op:
    group = cpu_group(scene.folder)
    group.mkdir(exist_ok=True)
    (group / "cpu.cfs_quota_us").write_text("10000")  # a tenth of one
    (group / "cgroup.procs").write_text(str(os.getpid()))
    return op


def _network(tool: str, line: str) -> Strike:
    """With the addresses of this rank and of the next one."""

    def happen(op: Op, scene: Scene) -> Op:
        words = line.format(next=(scene.rank + 1) % scene.world + 1).split()
        done = tools.run([tools.path_of(tool), *words])
        if done.returncode:
            raise LabError(f"rank {scene.rank}: `{tool} {' '.join(words)}` failed: {done.stderr}")
        return op

    return happen


KINDS: dict[str, Kind] = {
    **{
        name: Kind(Must.DEATH, _ends(name), any_time=True)
        for name, code in ENDINGS.items()
        if code is not None
    },
    STOP: Kind(Must.STALL, _ends(STOP), any_time=True),
    "short SIGSTOP": Kind(Must.GO_ON, _ends(STOP)),
    "flipped": Kind(Must.DAMAGE, flipped, first_step=0),
    "truncated": Kind(Must.DAMAGE, truncated, first_step=0),
    "replayed": Kind(Must.DAMAGE, replayed, first_step=1, last_step=2),
    "memory cap": Kind(Must.FAIL, _memory_cap, last_step=1),  # a batch has to come after it
    "full disk": Kind(Must.DISK, _full_disk, Needs.DISK, last_step=2),
    "slow processor": Kind(Must.GO_ON, _slow_processor, Needs.PROCESSOR),
    "link down": Kind(Must.STALL, _network("ip", "link set eth0 down"), Needs.LINKS),
    "one-way partition": Kind(
        Must.CUT, _network("ip", "route add blackhole 198.18.0.{next}/32"), Needs.LINKS
    ),
    "slow link": Kind(
        Must.GO_ON,
        _network("tc", f"qdisc add dev eth0 root tbf rate {_SLOW_RATE} burst 6056 latency 100ms"),
        Needs.LINKS,
    ),
}
