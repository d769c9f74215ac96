"""One process a host: its environment, its output, its end."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from gradsieve_tools.emulation.topology import Topology
from gradsieve_tools.errors import LabError

GRACE_SECONDS = 10.0  # for the other ranks, after one has failed
STOP_SECONDS = 3.0  # between SIGTERM and SIGKILL
_MASTER_PORT = 29500  # each lab is a network of its own, so no other lab can have taken the port
_LONGEST_LINE = 65_536


def environment(rank: int, topology: Topology, extra: Mapping[str, str] | None) -> dict[str, str]:
    """Return what torchrun would set with one process a host, and what gloo needs to use the lab."""
    index, count = str(rank), str(len(topology.hosts))
    ours = {
        "RANK": index,
        "WORLD_SIZE": count,
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": index,
        "GROUP_WORLD_SIZE": count,
        "ROLE_RANK": index,
        "ROLE_WORLD_SIZE": count,
        "NODE_RANK": index,
        "MASTER_ADDR": topology.addresses[0],
        "MASTER_PORT": str(_MASTER_PORT),
        "GLOO_SOCKET_IFNAME": topology.hosts[rank].gloo_interface,
        "TP_SOCKET_IFNAME": "eth0",
    }
    return {"OMP_NUM_THREADS": "1", **os.environ, **ours, **(extra or {})}


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End these process groups: SIGTERM, then SIGKILL for what is left."""
    for process in processes:
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while not all(map(_has_ended, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in processes:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    # WNOWAIT leaves it unreaped, so that its number still names its group.
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return process.returncode is not None or os.waitid(os.P_PID, process.pid, options) is not None


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # Once the process is reaped, its number may belong to another.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


class Supervisor:
    """Watches one process per rank to its end: passes their output on, notices failures, ends the rest."""

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        relay: subprocess.Popen[bytes] | None,
        timeout: float | None,
    ) -> None:
        self.processes = processes
        self.timeout = timeout
        self.codes: dict[int, int] = {}
        self.first_failure: int | None = None
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._signals = iter((signal.SIGTERM, signal.SIGKILL))
        self._ending = False
        self._selector = selectors.DefaultSelector()
        self._pidfds = [self._watch_end(process, rank) for rank, process in enumerate(processes)]
        if relay is not None:
            self._pidfds.append(self._watch_end(relay, "relay"))
        self._outputs = {rank: _Output(rank, p) for rank, p in enumerate(processes) if p.stdout is not None}
        for output in self._outputs.values():
            self._selector.register(output.fd, selectors.EVENT_READ, output)

    def run(self) -> list[int]:
        """Exit codes by rank, negative for a signal; never 0 for a rank that had to be ended."""
        try:
            while len(self.codes) < len(self.processes):
                wait = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
                for key, _ in self._selector.select(wait):
                    self._handle(key.data, key.fd)
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._escalate()
        finally:
            stop(self.processes)
            self._selector.close()
            for process in self.processes:
                if process.stdout is not None:
                    process.stdout.close()
            for pidfd in self._pidfds:
                os.close(pidfd)
        return [self.codes[rank] for rank in range(len(self.processes))]

    def _watch_end(self, process: subprocess.Popen[bytes], who: int | str) -> int:
        pidfd = os.pidfd_open(process.pid)
        self._selector.register(pidfd, selectors.EVENT_READ, who)
        return pidfd

    def _handle(self, source: "int | str | _Output", fd: int) -> None:
        if isinstance(source, _Output):
            if not source.pass_on():
                self._selector.unregister(fd)
        elif isinstance(source, int):
            self._selector.unregister(fd)
            self._ended(source)
        else:
            raise LabError("the relay that carries the hosts' packets ended; its error stands above")

    def _ended(self, rank: int) -> None:
        process = self.processes[rank]
        _signal_group(process, signal.SIGKILL)  # the children it left behind
        code = process.wait()
        if rank in self._outputs:
            self._outputs[rank].finish()
        if self._ending:
            code = code or -signal.SIGTERM
        elif code != 0:
            self._failed(rank, code)
        self.codes[rank] = code

    def _failed(self, rank: int, code: int) -> None:
        cause = f"exited with code {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
        _say(f"rank {rank} {cause}")
        if self.first_failure is None:
            self.first_failure = rank
            grace = time.monotonic() + GRACE_SECONDS
            self._deadline = grace if self._deadline is None else min(grace, self._deadline)

    def _escalate(self) -> None:
        running = [rank for rank in range(len(self.processes)) if rank not in self.codes]
        number = next(self._signals, None)
        if not running or number is None:
            self._deadline = None
            return
        if not self._ending:
            which = ", ".join(map(str, running))
            if self.first_failure is None:
                self.first_failure = running[0]
                _say(f"timed out after {self.timeout:g} s; still running, and ended now: rank {which}")
            else:
                _say(f"still running after rank {self.first_failure} failed, and ended now: rank {which}")
        self._ending = True
        for rank in running:
            _signal_group(self.processes[rank], number)
        self._deadline = time.monotonic() + STOP_SECONDS


class _Output:
    """The lines of one rank, each passed on to stderr with the rank before it."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.prefix = f"[rank {rank}] "
        self.fd = process.stdout.fileno()
        self.pending = b""
        os.set_blocking(self.fd, False)

    def pass_on(self) -> bool:
        """Pass on what has come; False if nothing had, or the stream has ended."""
        try:
            chunk = os.read(self.fd, _LONGEST_LINE)
        except BlockingIOError:
            return False
        *lines, self.pending = (self.pending + chunk).split(b"\n")
        if len(self.pending) > _LONGEST_LINE:
            lines.append(self.pending)
            self.pending = b""
        self._write(lines)
        return bool(chunk)

    def finish(self) -> None:
        """Pass on all that has come. No waiting: a child that left the group may hold the stream open."""
        while self.pass_on():
            pass
        if self.pending:
            self._write([self.pending])
            self.pending = b""

    def _write(self, lines: list[bytes]) -> None:
        for line in lines:
            sys.stderr.write(f"{self.prefix}{line.decode(errors='replace')}\n")
        sys.stderr.flush()


def _signal_name(number: int) -> str:
    # Most real-time signals have a number only.
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


def _say(text: str) -> None:
    print(f"[lab] {text}", file=sys.stderr, flush=True)
