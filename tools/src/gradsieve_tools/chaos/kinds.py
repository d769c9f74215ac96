"""What can happen to a rank, to what it sends, or to what it stands on; and what must come of it.

Everything is done by the rank to whom it happens, at an op or, from there on, at an operation on a file, so
that it can be repeated.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from gradsieve.checkpoint import files
from gradsieve.comm import sockets
from gradsieve.schemes import AllReduce, Op
from gradsieve_tools.chaos.ground import AWAY_SECONDS, FULL, cpu_group
from gradsieve_tools.chaos.writes import OPERATIONS, tap
from gradsieve_tools.emulation import tools
from gradsieve_tools.errors import LabError

BATCH_BYTES = 1 << 26  # allocated for every batch and never touched
_LEFT_BYTES = 1 << 23  # left by the memory cap beyond what is allocated
_SLOW_RATE = "2mbit"
_HOUR = 3600.0
NOTICE = signal.SIGUSR2  # SIGTERM ends a rank, SIGUSR1 shows where it hangs
STOP = "SIGSTOP"
# exit codes, negative for a signal
DEATHS = {
    "SIGKILL": -signal.SIGKILL,
    "SIGTERM": -signal.SIGTERM,
    "exit 0": 0,
    "exit 1": 1,
    "abort": -signal.SIGABRT,
}
ZOMBIE, SHORT_STOP, MIXED = "late waker", "short SIGSTOP", "mixed releases"


class Must(Enum):
    DEATH = "all others name the rank within 6 s"
    FAIL = "the rank fails by itself, all others name it within 6 s"
    STALL = "all others name the rank within the deadline and 1 s"
    CUT = "all ranks raise within the deadline and 1 s, and name no rank that lives"
    GO_ON = "nothing: the training goes on, bit for bit"
    DAMAGE = "all ranks raise, or nothing comes of it; nothing wrong is applied"
    DISK = "all ranks refuse to save, and the checkpoint before is whole"
    SURVIVE = "all ranks refuse alike and go on, bit for bit"
    DIVERGE = "all ranks raise DivergenceError instead of saving, or nothing comes of it"
    VANISH = "all others name the rank, which is gone, within the deadline and 1 s"
    FENCED = "all others name the rank within the deadline and 1 s; it cannot save once its successors have"
    DIFFERENT = "all ranks refuse to begin and say what differs"
    NOTICE = "all ranks save after the same step, and leave"


class Needs(Enum):
    NOTHING = "nothing"
    STORE = "a store in a process of its own"
    LINKS = "network namespaces"
    DISK = "a tmpfs, for which root is needed"
    PROCESSOR = "a cgroup of version 1 with cpu quotas, for which root is needed"


@dataclass(frozen=True, slots=True)
class Scene:
    rank: int
    world: int
    folder: Path
    bit: int  # bit of a payload, taken modulo its length
    earlier: dict[tuple[object, ...], Tensor]  # last payload this rank sent, by type and shape
    deadline: float
    store_pid: int  # 0: the store is in the campaign's process
    store_port: int
    tell: Callable[[str], None]  # reports a fault that comes later than its op


# Performs the fault and returns the op to perform; None: it cannot happen at this op, try the next
Strike = Callable[[Op, Scene], Op | None]


@dataclass(frozen=True, slots=True)
class Kind:
    must: Must
    strike: Strike
    needs: Needs = Needs.NOTHING
    last_step: int = 3  # last step of an episode in which the fault still has an effect
    first_step: int = -1  # -1: loading
    any_time: bool = False  # may also happen between ops
    last_op: int = 6  # last op of a step before which it may begin
    rank: int | None = None  # the only rank it can happen to
    is_later: bool = False  # the strike prepares it, and it reports itself
    spoils: Callable[[Tensor, Scene], None] | None = None  # alters the op's result


def strike(kind: str) -> None:
    """End or stop this process. Return only after a stop that was continued."""
    match kind:
        case "SIGKILL" | "SIGSTOP" | "SIGTERM":
            os.kill(os.getpid(), signal.Signals[kind])
        case "exit 0" | "exit 1":
            os._exit(int(kind[-1]))
        case "abort":
            os.abort()
    if kind != STOP:
        time.sleep(60.0)  # another thread may take the signal, a moment later


def form(op: Op) -> tuple[object, ...]:
    return type(op), op.tensor.shape, op.tensor.dtype


def _ends(kind: str) -> Strike:
    def happen(op: Op, scene: Scene) -> Op:
        strike(kind)
        return op

    return happen


def flipped(op: Op, scene: Scene) -> Op | None:
    """Flip a bit, but not in what the backend adds up itself: no check can see that (`pipeline/frame.py`)."""
    if not op.tensor.numel() or isinstance(op, AllReduce):
        return None
    content = op.tensor.contiguous().clone()
    octets = content.view(-1).view(torch.uint8)
    place = scene.bit % (8 * octets.numel())
    octets[place // 8] ^= 1 << place % 8
    return replace(op, tensor=content)


def replayed(op: Op, scene: Scene) -> Op | None:
    """Return what was sent last in the same form, if that was something else."""
    before = scene.earlier.get(form(op))
    if before is None or isinstance(op, AllReduce) or torch.equal(before, op.tensor):
        return None
    return replace(op, tensor=before.clone())


def truncated(op: Op, scene: Scene) -> Op | None:
    """Break off the message and end the connections; `rank.py` does it."""
    return op if op.tensor.numel() > 1 else None


def _summed(op: Op, scene: Scene) -> Op | None:
    return op if isinstance(op, AllReduce) and op.tensor.dtype == torch.float32 else None


def _spoil(total: Tensor, scene: Scene) -> None:
    """Alter this rank's sum alone, before the trailing words: otherwise ranks disagree at once."""
    total.view(-1).view(torch.int32)[scene.bit % min(total.numel(), 16)] ^= 1 << 20


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
    def happen(op: Op, scene: Scene) -> Op:
        words = line.format(next=(scene.rank + 1) % scene.world + 1).split()
        done = tools.run([tools.path_of(tool), *words])
        if done.returncode:
            raise LabError(f"rank {scene.rank}: `{tool} {' '.join(words)}` failed: {done.stderr}")
        return op

    return happen


def _partition(share: float) -> Strike:
    down, up = (_network("ip", f"link set eth0 {state}") for state in ("down", "up"))

    def happen(op: Op, scene: Scene) -> Op | None:
        heal = threading.Timer(share * scene.deadline, up, (op, scene))
        heal.daemon = True
        heal.start()
        return down(op, scene)

    return happen


def _vanish(op: Op, scene: Scene) -> Op | None:
    """Cut the link first, so that the kernel's farewell for the dead process reaches no peer."""
    _network("ip", "link set eth0 down")(op, scene)
    strike("SIGKILL")
    return op


def _clock(seconds: float) -> Strike:
    def jump(op: Op, scene: Scene) -> Op:
        usual = time.time
        vars(time)["time"] = lambda: usual() + seconds
        return op

    return jump


def _notice(op: Op, scene: Scene) -> Op:
    os.kill(os.getpid(), NOTICE)
    return op


def _store_gone(op: Op, scene: Scene) -> Op:
    os.kill(scene.store_pid, signal.SIGKILL)
    return op


def _store_gone_before_death(op: Op, scene: Scene) -> Op:
    """Kill the store, and this rank once the others have found the store again."""
    _store_gone(op, scene)
    time.sleep(2.5 * AWAY_SECONDS)
    scene.tell(type(op).__name__)
    strike("SIGKILL")
    return op


def _store_reset(op: Op, scene: Scene) -> Op:
    others = sockets.connected(scene.store_port)
    sockets.shut({fd: inode for fd, inode in sockets.connected(0).items() if fd not in others})
    return op


def _in_file(begin: str, operations: Sequence[str], happen: Callable[[Scene], None]) -> Strike:
    """Strike in the first or second operation of a kind on a file whose name begins with `begin`."""

    def prepare(op: Op, scene: Scene) -> Op:
        which, left = operations[scene.bit % len(operations)], scene.bit // len(operations) % 2

        def within(operation: str, name: str) -> None:
            nonlocal left
            if operation == which and name.startswith(begin):
                left -= 1
                if left == -1:
                    scene.tell(f"{operation} of {begin}")
                    happen(scene)

        tap(within)
        return op

    return prepare


def _no_space(scene: Scene) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _unreadable_once(op: Op, scene: Scene) -> Op:
    usual = files.read_shard

    def fail(*_: object) -> None:
        vars(files)["read_shard"] = usual
        scene.tell("read of a shard")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    vars(files)["read_shard"] = fail
    return op


KINDS: dict[str, Kind] = {
    **{name: Kind(Must.DEATH, _ends(name), any_time=True) for name in DEATHS},
    STOP: Kind(Must.STALL, _ends(STOP), any_time=True),
    SHORT_STOP: Kind(Must.GO_ON, _ends(STOP)),
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
    "host gone": Kind(Must.VANISH, _vanish, Needs.LINKS, any_time=True),
    "healed partition": Kind(Must.GO_ON, _partition(0.4), Needs.LINKS),
    "partition healed too late": Kind(Must.STALL, _partition(1.6), Needs.LINKS),
    "store gone": Kind(Must.GO_ON, _store_gone, Needs.STORE),
    "store gone before SIGKILL": Kind(Must.DEATH, _store_gone_before_death, Needs.STORE, is_later=True),
    "store reset": Kind(Must.GO_ON, _store_reset),
    # Not in the handshake of the ranks before they save: that one is thrown away.
    "damaged sum": Kind(Must.DIVERGE, _summed, first_step=0, last_step=1, last_op=0, spoils=_spoil),
    # Two saves have to come after these.
    "SIGKILL in a shard": Kind(
        Must.DEATH, _in_file("rank", OPERATIONS, lambda _: strike("SIGKILL")), last_step=1, is_later=True
    ),
    "SIGKILL in a manifest": Kind(
        Must.DEATH,
        _in_file("manifest", OPERATIONS, lambda _: strike("SIGKILL")),
        last_step=1,
        rank=0,
        is_later=True,
    ),
    ZOMBIE: Kind(
        Must.FENCED,
        _in_file("manifest", ["unlink", "fsync", "rename"], lambda _: strike(STOP)),
        last_step=1,
        rank=0,
        is_later=True,
    ),
    "slow disk": Kind(
        Must.STALL,
        _in_file("rank", ["fsync"], lambda scene: time.sleep(scene.deadline + 2.0)),
        last_step=1,
        is_later=True,
    ),
    "refused save": Kind(Must.SURVIVE, _in_file("rank", ["write"], _no_space), last_step=1, is_later=True),
    "refused load": Kind(Must.SURVIVE, _unreadable_once, last_step=-1, last_op=0, is_later=True),
    MIXED: Kind(Must.DIFFERENT, lambda op, _: op),  # before there is an op: `rank.py` does it
    "notice": Kind(Must.NOTICE, _notice, last_step=1),
    "clock ahead": Kind(Must.GO_ON, _clock(_HOUR)),
    "clock behind": Kind(Must.GO_ON, _clock(-_HOUR)),
}
