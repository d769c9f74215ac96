"""What a rank knows about itself before any message: where gloo would listen, threads, versions, kernels."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gradsieve.kernels import active
from gradsieve.torch_names import PRIVATE, Private
from gradsieve_tools.results import versions

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
VARIABLES = ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG")


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    address: str  # IPv4; empty where it has none
    network: str  # with the length of its prefix
    up: bool
    loopback: bool
    speed: int = 0  # bit/s as its driver says, of a physical one; 0: not known


@dataclass(frozen=True, slots=True)
class Facts:
    rank: int
    hostname: str
    alias: str  # another name that /etc/hosts has for its address: hosts of a lab share the machine's own
    machine: str  # the same for all processes of one running system
    host: str  # the same for all processes of one machine that see the same interfaces
    interfaces: tuple[Interface, ...]
    resolved: tuple[str, ...]  # addresses of the host's own name
    toward_master: str  # own address towards MASTER_ADDR; empty: none
    environment: Mapping[str, str]
    threads: int
    cores: int  # cores this process may use
    quota: float  # processors that the cgroup allows on average; 0: no limit
    kernels: str
    versions: Mapping[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()  # names torch lacks, and what is lost without them

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.alias or self.hostname})"

    @property
    def asked(self) -> str:
        """Return what GLOO_SOCKET_IFNAME says; empty where it is not set."""
        return self.environment.get("GLOO_SOCKET_IFNAME", "")

    def interface(self, name: str) -> Interface | None:
        return next((each for each in self.interfaces if each.name == name), None)

    def having(self, address: str) -> Interface | None:
        return next((each for each in self.interfaces if each.address == address), None)

    @property
    def listens_on(self) -> Interface | None:
        """Return gloo's interface: the given one, else that of the host's own name; None: the given one is
        missing."""
        if self.asked:
            return self.interface(self.asked.split(",")[0])
        own = (found for address in self.resolved if (found := self.having(address)) is not None)
        return next(own, next((each for each in self.interfaces if each.loopback), None))


def collect(rank: int, master: str) -> Facts:
    interfaces = tuple(_interface(name) for _, name in socket.if_nameindex())
    hostname = socket.gethostname()
    toward = _toward(master)
    space = os.stat("/proc/self/ns/net") if Path("/proc/self/ns/net").exists() else None
    machine = _read("/proc/sys/kernel/random/boot_id") or hostname
    return Facts(
        rank=rank,
        hostname=hostname,
        alias=_alias(hostname, toward),
        machine=machine,
        host=f"{machine}/{space.st_ino if space else 0}",
        interfaces=interfaces,
        resolved=_resolved(hostname),
        toward_master=toward,
        environment={name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)),
        quota=_quota(),
        kernels=active(),
        versions={name: str(value) for name, value in versions().items() if name != "cpus"},
        lacks=tuple(private.lost for private in PRIVATE if not is_there(private)),
    )


def is_there(private: Private) -> bool:
    """Say whether the installed torch has the name."""
    if private.owner.endswith(".py"):
        file = Path(torch.__file__).parent / private.owner
        return file.is_file() and private.name in file.read_text(encoding="utf-8")
    module, *inner = private.owner.split(":")
    try:
        owner = importlib.import_module(module)
        for name in inner:
            owner = getattr(owner, name)
    except (ImportError, AttributeError):
        return False
    return hasattr(owner, private.name)


def _interface(name: str) -> Interface:
    address, mask = _asked(name, _SIOCGIFADDR), _asked(name, _SIOCGIFNETMASK)
    flags = _asked(name, _SIOCGIFFLAGS)
    bits = struct.unpack("H", flags[:2])[0] if flags else 0
    ip, netmask = (socket.inet_ntoa(raw[4:8]) if raw else "" for raw in (address, mask))
    network = str(ipaddress.ip_network(f"{ip}/{netmask}", strict=False)) if ip and netmask else ""
    folder = Path("/sys/class/net") / name
    speed = _read(folder / "speed") if (folder / "device").exists() else ""
    megabits = int(speed) if speed.lstrip("-").isdigit() else 0
    return Interface(
        name, ip, network, bool(bits & _IFF_UP), bool(bits & _IFF_LOOPBACK), max(megabits, 0) * 10**6
    )


def _asked(name: str, request: int) -> bytes:
    """Return what the kernel answers about an interface, after its name; empty where it has no such thing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket.fileno(), request, struct.pack("16s24x", name.encode()[:15]))[16:]
    return b""


def _resolved(hostname: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _toward(master: str) -> str:
    """Ask the kernel's routes: a UDP socket that is connected sends nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))
        return str(probe.getsockname()[0])
    return ""


def _alias(hostname: str, address: str) -> str:
    for line in _read("/etc/hosts").splitlines():
        found, *names = line.partition("#")[0].split() or [""]
        others = [name for name in names if name not in (hostname, "localhost")]
        if found == address and others:
            return others[0]
    return ""


def _quota() -> float:
    """The smallest of its cgroup and those above, of version 1 or 2."""
    found = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup/cpu" if controllers else "/sys/fs/cgroup")
        for folder in (root / str(each).lstrip("/") for each in (Path(place), *Path(place).parents)):
            limits = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}".split()
            found += [_share(limits or _read(folder / "cpu.max").split())]
    return min(filter(None, found), default=0.0)


def _share(limits: list[str]) -> float:
    if len(limits) != 2 or not all(each.isdigit() for each in limits) or not int(limits[1]):
        return 0.0
    return int(limits[0]) / int(limits[1])


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
