"""Processes of a bench: how ranks start, how each leaves, and how all end when the bench is interrupted."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from gradsieve_tools.emulation import signals


def run_ranks(rank: Callable[..., None], args: tuple[Any, ...], world: int) -> None:
    """`rank(number, *args)` in so many processes, to their end."""
    with ended_with_us():
        with signals.held_back():  # a process that is interrupted in its birth complains
            started = spawn(rank, args, nprocs=world, join=False)  # type: ignore[no-untyped-call]
        while not started.join():
            pass


def leave() -> NoReturn:
    """End this rank's process, when all ranks have come here; its results are written, its syncs closed.

    Not by way of Python's own end. A DDP model keeps its group, and the group its threads, beyond
    destroy_process_group(); one that lets go of a tensor while Python takes itself apart aborts the process:
    "terminate called without an active exception".
    """
    dist.barrier()  # no connection goes while another rank still needs it
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def lead_a_group() -> None:
    """So that this process ends together with those that it starts: see `ended_with_us`."""
    os.setpgrp()


@contextlib.contextmanager
def ended_with_us() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end this block and, at once, the processes started in it.

    Otherwise Python would wait until they have done their work.
    """
    usual = signals.unwind_on_ending()
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        with signals.held_back():
            _kill_children()
        raise
    finally:
        signals.restore(usual)


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        assert child.pid is not None  # it was started
        with contextlib.suppress(ProcessLookupError):  # leads no group
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
