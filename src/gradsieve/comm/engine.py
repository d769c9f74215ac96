"""Carries a scheme's ops over torch.distributed, beside backward.

The engine has one thread and one process group of its own. Programs run in the order in which they were
submitted, each to its end: every rank issues its collectives in the same (unit, round) order, whatever
completes first. (Chained futures, as in torch's PowerSGD hook, issue them in completion order and mismatch on
gloo.) Empty buffers are not sent: gloo has died on those, and all ranks know the shapes.

A failure is named and ends all waits (`failures.py`, `sockets.py`); after one the engine refuses all ops,
because gloo's connections do not survive a time-out.

On an accelerator the thread works on one stream of its own, and the group is gloo all the same: messages go
through pinned memory of the host (ADR 47). This was run on an emulated device only.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from gradsieve import torch_names
from gradsieve.comm import sockets
from gradsieve.comm.failures import ANSWER_SECONDS, ANSWER_SECONDS_LATE, Watch
from gradsieve.comm.notes import Progress
from gradsieve.comm.ops import (
    FEW,
    IN_FLIGHT,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Op,
    describe,
)
from gradsieve.errors import ConfigError, GradsieveError, Malformed, MismatchError, PeerError, RefusedError
from gradsieve.types import Program, Result, can_pin, run_program

if TYPE_CHECKING:
    from gradsieve.comm.links import Links

_LOOK = 0.01  # seconds between two looks whether all ranks have met
# Number of engines made over a group. All ranks of a group make them together and agree on the number.
_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class _BackendError(Exception):
    """The backend's message about a peer, or about what is between ranks."""


class Engine:
    """Runs programs on a process group, in order, on a thread of its own."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        users = group or dist.group.WORLD
        assert users is not None
        ranks = dist.get_process_group_ranks(users)
        self._timeout = _timeout(users)
        self.rank, self.world = place_in(users)
        self._progress = Progress()
        self.links: Links | None = None  # None: the backend carries every collective
        self._sockets: sockets.Sockets = {}
        self._group: dist.ProcessGroup | None = None
        self._streams: dict[torch.device, torch.Stream] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._queueing = threading.Lock()
        self._is_closed = False
        self._watch = self._start_watch(users)
        # Our own group: DDP's buffer broadcasts on the user's group must not come between our collectives.
        # A part of the world must make its group alone. Torch names that after its ranks, and a second one
        # would find the first one's addresses: such a group is kept to the end.
        self._is_whole_world = len(ranks) == dist.get_world_size()
        self._make_group(users, ranks)
        threads = torch.get_num_threads()  # OpenMP keeps this per thread
        self._thread = threading.Thread(target=self._work, args=(threads,), name="gradsieve", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that outlives the interpreter can abort the process

    def _start_watch(self, users: dist.ProcessGroup) -> Watch:
        count = _engines[users] = _engines.get(users, 0) + 1
        prefix = f"gradsieve/{users.group_name}/{count}"
        store = torch_names.connected_once_more(torch_names.default_store())
        server = torch_names.server_of(store)
        self._store_port = 0 if server is None else server.port
        hosts_store = sockets.listens_on(self._store_port)
        return Watch(store, prefix, self.rank, self.world, self._progress, self._end_connections, hosts_store)

    def _make_group(self, users: dist.ProcessGroup, ranks: list[int]) -> None:
        began = time.monotonic()
        before = sockets.connected(self._store_port)
        try:
            self._group = dist.new_group(
                ranks,
                timeout=self._timeout,
                backend=_backend(users),
                use_local_synchronization=not self._is_whole_world,
            )
        except RuntimeError as error:
            cause = str(error)
        else:
            now = sockets.connected(self._store_port)
            opened = {fd: inode for fd, inode in now.items() if before.get(fd) != inode}
            # Any other number: gloo connects otherwise, or other code of this process did meanwhile.
            self._sockets = opened if len(opened) == self.world - 1 else {}
            self._watch.learn_host()
            return
        failure = self._failure("making a process group", cause, time.monotonic() - began)
        self._watch.close()
        raise failure

    def agree_on_secret(self, device: torch.device) -> None:
        """Keep the watch's keys under a secret from now on: no stranger who reaches the store can guess them,
        nor another group that uses the same store later."""
        secret = self.run(_secret(device), "the secret of the watch", device)
        server = torch_names.server_of(torch_names.default_store())
        connect = None if server is None else partial(torch_names.connected_to, server)
        self._watch.move_to(connect, f"gradsieve/{secret}")

    def submit(self, program: Program[Result], what: str, device: torch.device) -> Future[Result]:
        """Queue a program; `what` names it in errors."""
        return self.call(lambda: self._drive(program, what), device)

    def call(self, function: Callable[[], Result], device: torch.device) -> Future[Result]:
        """Queue a function behind the programs already there. Ctrl-C interrupts only a wait for it."""
        future: Future[Result] = Future()
        ready = None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()

        def job() -> None:
            try:
                with self._own_stream(device, ready):
                    result = function()
            except BaseException as error:  # it belongs to the caller
                if _is_of_this_rank(error):
                    self._watch.give_up(f"{type(error).__name__}: {error}")
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._queueing:
            if self._is_closed:
                future.set_exception(self._closed())
            else:
                self._jobs.put(job)
        return future

    def _closed(self) -> ConfigError:
        return ConfigError(
            f"rank {self.rank}: the sync is closed, and exchanges nothing any more: call flush(), save() or "
            "verify() before close(), or gradsieve.attach() again"
        )

    @contextlib.contextmanager
    def _own_stream(self, device: torch.device, ready: torch.Event | None) -> Iterator[None]:
        """Work on the engine's stream, behind what the caller's had queued, until all of it is done."""
        if ready is None:
            yield
            return
        if device not in self._streams:
            torch.accelerator.set_device_index(device)  # a thread begins with the first one
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        stream.wait_event(ready)
        try:
            with stream:
                yield
        finally:
            stream.synchronize()

    def run(self, program: Program[Result], what: str, device: torch.device) -> Result:
        """Queue a program behind those already there and wait for it."""
        return self.submit(program, what, device).result()

    @contextlib.contextmanager
    def called(self, call: str, step: int, meets: bool = False) -> Iterator[None]:
        """Name the ranks that a user's call waits for in vain inside of this context."""
        self._watch.calls.begin(call, step, meets)
        try:
            yield
        finally:
            self._watch.calls.end()

    def meet(self, call: str, step: int) -> None:
        """Return when all ranks make this call; raise on all of them if one has gone on instead. They meet in
        the store: a collective cannot reach a rank that is in another one."""
        if self._is_closed:
            raise self._closed()
        if self.world == 1:
            return
        began, what, watch = time.monotonic(), f"{call} after step {step}", self._watch
        with self.called(call, step, meets=True):
            watch.look_now()
            while not watch.calls.has_met() and watch.without_store is None:
                time.sleep(_LOOK)
                seconds = time.monotonic() - began
                if watch.verdict is not None:
                    raise watch.verdict.error(self.rank, f"{what} failed after {seconds:.1f} s")
                if seconds > self._timeout.total_seconds() or sockets.lost(self._sockets):
                    raise self._failure(what, "", seconds)

    def close(self) -> None:
        """End the thread after what is queued, and the group; what hangs is left to its time-out. What is
        queued afterwards ends with a ConfigError."""
        atexit.unregister(self.close)
        with self._queueing:
            if self._is_closed:
                return
            self._is_closed = True
            self._jobs.put(None)
        self._thread.join(timeout=1.0)
        self._watch.close()
        if (self._is_whole_world or self._watch.verdict is not None) and not self._thread.is_alive():
            self._drop_group()

    def _drop_group(self) -> None:
        if self._group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # its world has ended
                dist.destroy_process_group(self._group)
        self._group = None  # closes its sockets

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)
        with torch.no_grad():
            while (job := self._jobs.get()) is not None:
                job()

    def _drive(self, program: Program[Result], what: str) -> Result:
        self._progress.begun += 1
        return run_program(program, lambda op: self._await(op, what))

    def _await(self, op: Op, what: str) -> Tensor:
        if (verdict := self._watch.refusal) is not None:
            raise verdict.error(self.rank, f"{describe(op)} for {what} failed before it began")
        progress = self._progress
        progress.ops, progress.waits, progress.what = progress.ops + 1, True, what
        began = time.monotonic()
        try:
            reply = self.perform(op)
        except _BackendError as error:
            message = str(error)  # the error's frames would keep the group and its sockets
        else:
            progress.waits = False
            return reply
        raise self._failure(f"{describe(op)} for {what}", message, time.monotonic() - began)

    def _failure(self, what: str, by_backend: str, seconds: float) -> PeerError | MismatchError:
        """Return the error for `what`, which failed after so long. After less than the deadline, only
        connections to dead ranks are closed; at the deadline survivors have closed theirs to each other."""
        if seconds < self._timeout.total_seconds() - 2.0:
            verdict = self._watch.ask(ANSWER_SECONDS, sockets.lost(self._sockets))
        else:
            verdict = self._watch.ask(ANSWER_SECONDS_LATE)
        return verdict.error(self.rank, f"{what} failed after {seconds:.1f} s", by_backend)

    def _end_connections(self) -> None:
        """End all waits of this rank and for it. Without known connections that happens when its own wait is
        over: then the others fail one after the other, a few ms each."""
        if self._sockets:
            sockets.shut(self._sockets)
        else:
            self._jobs.put(self._drop_group)

    def assume_links(self) -> None:
        """Let collectives of many ranks go by messages of our own, from now on, if these look faster."""
        if self.world > FEW:
            from gradsieve.comm import links

            self.links = links.nominal(self.world)

    def perform(self, op: Op) -> Tensor:
        """Carry the op from the host's memory, where its tensor is copied to if it is elsewhere."""
        device = op.tensor.device
        if device.type == "cpu":
            return self._carry(op)
        return self._carry(replace(op, tensor=_to_host(op.tensor))).to(device, non_blocking=True)

    def _carry(self, op: Op) -> Tensor:
        if self.links is not None:
            from gradsieve.comm import rounds

            program = rounds.program_for(op, self.rank, self.world, self.links)
            if program is not None:
                return run_program(program, self.by_backend)
        return self.by_backend(op)

    def by_backend(self, op: Op) -> Tensor:
        """Carry the op by one collective of the group's, or by its messages."""
        tensor, group = op.tensor.contiguous(), self._group
        match op:
            case AllGather():
                out = _empty((self.world, *tensor.shape), tensor)
                if self.world == 1:
                    out[0] = tensor
                elif tensor.numel():
                    _collective(torch_names.all_gather_flat, out.view(-1), tensor.view(-1), group)
                return out
            case AllReduce():
                if self.world > 1 and tensor.numel():
                    _collective(dist.all_reduce, tensor, group=group)
                return tensor
            case Broadcast(root=root):
                if self.world > 1 and tensor.numel():
                    _collective(dist.broadcast, tensor, group_src=root, group=group)
                return tensor
            case AllToAll():
                return self._all_to_all(tensor, op)
            case Exchange():
                return self._exchange(tensor, op)

    def _all_to_all(self, tensor: Tensor, op: AllToAll) -> Tensor:
        """Send to rank r + s and receive from rank r - s in round s: no rank is the target of all at once. A
        few rounds are pending together. If all counts are the same, the backend does this in one call."""
        out = _empty((sum(op.receive_counts), *tensor.shape[1:]), tensor)
        if op.even and self.world > 1 and tensor.numel():
            _collective(dist.all_to_all_single, out, tensor, group=self._group)
            return out
        sends = torch.split(tensor, list(op.send_counts))
        receives = torch.split(out, list(op.receive_counts))
        receives[self.rank].copy_(sends[self.rank])
        for first in range(1, self.world, IN_FLIGHT):
            moves = []
            for shift in range(first, min(first + IN_FLIGHT, self.world)):
                to, source = (self.rank + shift) % self.world, (self.rank - shift) % self.world
                moves += self._moves(sends[to], to, receives[source], source)
            _collective(_move, moves)
        return out

    def _exchange(self, tensor: Tensor, op: Exchange) -> Tensor:
        if op.to == self.rank:
            return tensor.clone()
        out = _empty((op.receive,), tensor)
        _collective(_move, self._moves(tensor, op.to, out, op.source))
        return out

    def _moves(self, send: Tensor, to: int, receive: Tensor, source: int) -> list[dist.P2POp]:
        moves = []
        if send.numel():
            moves.append(dist.P2POp(dist.isend, send, group=self._group, group_peer=to))
        if receive.numel():
            moves.append(dist.P2POp(dist.irecv, receive, group=self._group, group_peer=source))
        return moves


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this rank's number in the group, and its number of ranks."""
    return dist.get_rank(group), dist.get_world_size(group)


def _secret(device: torch.device) -> Program[str]:
    """Hash bytes of all ranks: the secret is known when all ranks have come to this point."""
    mine = torch.tensor(list(secrets.token_bytes(16)), dtype=torch.uint8, device=device)
    everyone = yield AllGather(mine)
    return hashlib.sha256(bytes(everyone.flatten().tolist())).hexdigest()[:32]


def _is_of_this_rank(error: BaseException) -> bool:
    """Say whether an error may have occurred on this rank alone, and the others would wait in vain. Errors of
    ours are raised on all ranks alike, except for malformed messages; after a refusal all ranks go on."""
    if isinstance(error, GradsieveError):
        return isinstance(error, Malformed) and not isinstance(error, RefusedError)
    return isinstance(error, Exception)


def _collective(call: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Attribute what a collective raises to the backend, except for a lack of memory."""
    try:
        call(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise _BackendError(str(error)) from None


def _to_host(tensor: Tensor) -> Tensor:
    """Copy a device's memory, and wait for it and for what was queued on this stream before it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=can_pin())
    host.copy_(tensor, non_blocking=True)
    torch.accelerator.current_stream(tensor.device).synchronize()
    return host


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return memory of the host for what arrives, pinned if `like` is."""
    return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=like.is_pinned())


def _move(moves: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(moves) if moves else ():
        work.wait()


def _backend(group: dist.ProcessGroup) -> str:
    """Return the backend of the user's group for tensors of the host; gloo if it has none."""
    listed = dict(entry.split(":") for entry in str(dist.get_backend_config(group)).split(","))
    return listed.get("cpu", "gloo")


def _timeout(group: dist.ProcessGroup) -> timedelta:
    timeout = torch_names.timeout_of(group)
    if timeout <= timedelta(0):
        raise ConfigError(
            f"the process group's time-out is {timeout.total_seconds():g} s: every wait needs a deadline; "
            "give init_process_group() a positive one"
        )
    return timeout
