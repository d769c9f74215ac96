"""What a user of the lab holds: a network while the `with` block lasts, and processes on its hosts."""

import atexit
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, ClassVar

from typing_extensions import Self

from gradsieve.errors import ConfigError
from gradsieve_tools.emulation import namespaces, quotas, ranks, signals, tools
from gradsieve_tools.emulation.network import Network, build
from gradsieve_tools.emulation.topology import Topology, check_hosts, star
from gradsieve_tools.emulation.units import parse_delay, parse_rate
from gradsieve_tools.errors import LabError

_LONGEST_TIMEOUT = 1e6

Stream = int | IO[bytes] | None


class Lab:
    """Hosts joined by switches, each in a network namespace of its own, removed when the block ends.

    with Lab(hosts=4, rate="1gbit", delay="5ms") as lab:
        exit_codes = lab.run(["python", "train.py"], timeout=600)

    hosts   1 to 64 at one switch; they share this machine's cores and memory. Or a `Topology`, with other
            switches and links, each with a rate and a delay of its own
    rate    of each link, both ways, e.g. "100mbit"; None or "unshaped" is as fast as the machine goes
    delay   one way from host to host, e.g. "5ms"; None is none

    A process runs one lab at a time. Ctrl-C, SIGTERM and exceptions clean up; after SIGKILL the processes die
    at once and the next lab of any user removes the namespaces.
    """

    _open: ClassVar["Lab | None"] = None

    def __init__(self, hosts: int | Topology, rate: str | None = None, delay: str | None = None) -> None:
        if not isinstance(hosts, Topology):
            hosts = star(check_hosts(hosts), parse_rate(rate), parse_delay(delay))
        elif rate is not None or delay is not None:
            raise ConfigError("the links of a network have rates and delays of their own")
        self._network = Network(os.getpid(), hosts)
        self._relay: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_built = False
        self._usual_handlers: signals.Handlers = {}
        self.first_failure: int | None = None  # the rank that failed first in the last run

    @property
    def addresses(self) -> list[str]:
        return self._network.topology.addresses

    def netns(self, host: int) -> str:
        """The namespace of a host, as `ip netns` names it."""
        return self._network.hosts[host]

    def run(
        self, argv: Sequence[str], *, timeout: float | None = None, env: Mapping[str, str] | None = None
    ) -> list[int]:
        """Run one process a host to its end; returns their exit codes by rank, negative for a signal.

        Rank 0 writes straight to this process's stdout and stderr; lines of other ranks go to stderr, each
        after its rank. When a rank fails the others get ten seconds, then are ended; so are all at `timeout`.
        """
        if timeout is not None and not 0 < timeout <= _LONGEST_TIMEOUT:
            raise ConfigError(f"timeout is {timeout!r}; it must be a positive number of seconds")
        command = self._resolved(argv, env)
        processes = [
            self._start(rank, command, env, *((subprocess.PIPE, subprocess.STDOUT) if rank else (None, None)))
            for rank in range(len(self.addresses))
        ]
        supervisor = ranks.Supervisor(processes, self._relay, timeout)
        exit_codes = supervisor.run()
        self.first_failure = supervisor.first_failure
        return exit_codes

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> list[subprocess.Popen[bytes]]:
        """Start one process a host and return at once; each leads a process group of its own.

        Call it from a thread that outlives them: Linux ends a child with the thread that started it.
        """
        command = self._resolved(argv, env)
        return [self._start(rank, command, env, stdout, stderr) for rank in range(len(self.addresses))]

    def close(self) -> None:
        """End all processes and remove the network. Signals that come meanwhile wait until it is done."""
        try:
            with signals.held_back():
                # A forked child has inherited this object, but not the right to end its parent's lab.
                if self._is_built and os.getpid() == self._network.pid:
                    self._remove()
        finally:
            signals.restore(self._usual_handlers)

    def __enter__(self) -> Self:
        if Lab._open is not None:
            raise LabError("this process runs a lab already; close that one first")
        reason = tools.available()
        if reason is not None:
            raise LabError(f"the lab cannot run here: {reason}")
        # From here on there is something to remove, whatever interrupts the next lines.
        Lab._open, self._is_built = self, True
        atexit.register(self.close)
        try:
            self._usual_handlers = signals.unwind_on_ending()
            namespaces.sweep()
            self._relay = build(self._network)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _resolved(self, argv: Sequence[str], env: Mapping[str, str] | None) -> list[str]:
        if not self._is_built:
            raise LabError("the lab is not open; use it as `with Lab(...) as lab:`")
        if not argv:
            raise ConfigError("there is no command to run on the hosts")
        program = shutil.which(argv[0], path=(env or {}).get("PATH", os.environ.get("PATH")))
        if program is None:
            raise ConfigError(f"the command {argv[0]!r} is not an executable file and not on PATH")
        return [program, *argv[1:]]

    def _start(
        self, rank: int, command: Sequence[str], env: Mapping[str, str] | None, stdout: Stream, stderr: Stream
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            namespaces.entering(self.netns(rank), command),
            env=ranks.environment(rank, self._network.topology, env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        if self.netns(rank) in self._network.quotas:
            quotas.enter(self.netns(rank), process.pid)  # while it still is `setpriv`, which starts nothing
        self._processes = [*(one for one in self._processes if one.returncode is None), process]
        return process

    def _remove(self) -> None:
        try:
            ranks.stop(self._processes)
            if self._relay is not None:
                self._relay.kill()
                self._relay.wait()
        finally:
            namespaces.remove([*self._network.hosts, self._network.switch])
            self._is_built, Lab._open = False, None
            atexit.unregister(self.close)
