"""A slice of the kill matrix on real ranks; the whole of it is a command, `gradsieve lab kill-matrix`."""

from __future__ import annotations

import json
import os
import signal
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsieve.comm.engine import Engine
from gradsieve.comm.ops import AllReduce
from gradsieve.errors import PeerError
from gradsieve.types import Program
from gradsieve_tools.faults.fleet import Ending
from gradsieve_tools.faults.kinds import STOP, Fault
from gradsieve_tools.faults.matrix import WORLD, Clean, Matrix
from gradsieve_tools.faults.trained import DONE, PEER_FAILED

DEADLINE = 2.0


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return Matrix()


@pytest.fixture(scope="module")
def clean(matrix: Matrix) -> Clean:
    return matrix.clean("exdyna")


@pytest.mark.parametrize(
    "fault",
    [Fault("SIGKILL", 0, 1, 0), Fault("exit 0", 2, 1, 1), Fault(STOP, 1, 1, 1)],
    ids=lambda fault: fault.kind,
)
def test_every_survivor_names_the_rank_in_time_and_keeps_nothing(
    matrix: Matrix, clean: Clean, fault: Fault
) -> None:
    (line,) = matrix.run(clean, [fault])
    assert line.outcome == "named", line


def test_a_fault_that_does_not_happen_is_seen(matrix: Matrix, clean: Clean) -> None:
    clean.ops[1].append("no such op")
    (line,) = matrix.run(clean, [Fault("SIGKILL", 0, 1, len(clean.ops[1]) - 1)])
    clean.ops[1].pop()
    assert "the fault did not happen" in line.outcome
    assert "rank 1: raised nothing" in line.outcome


def test_a_stop_of_half_the_deadline_is_no_failure(matrix: Matrix, clean: Clean) -> None:
    endings = matrix.endings("exdyna", DEADLINE, Fault(STOP, 1, 1, 0), stop_seconds=DEADLINE / 2)
    ended = [ending.message("ended") for ending in endings]
    assert [ending.exit_code for ending in endings] == [DONE] * WORLD, ended
    assert [each["digests"] for each in ended] == [clean.digests] * WORLD
    assert ended[0]["at"] - endings[1].message("fired")["at"] > DEADLINE / 2, "it was stopped"


def test_a_rank_with_fewer_batches_is_named_as_such(matrix: Matrix) -> None:
    endings = matrix.endings("exdyna", 60.0, None, steps=(6, 3, 6))
    assert [ending.exit_code for ending in endings] == [PEER_FAILED, DONE, PEER_FAILED]
    for rank in (0, 2):
        ended = endings[rank].message("ended")
        assert ended["ranks"] == [1]
        assert "rank 1 left after unit 0 of 1 in step 2" in ended["said"]
        assert "drop_last=True" in ended["said"]


def wait_for_the_host(rank: int, port: int, pipe: Any) -> None:
    """Rank 0 has the store, as without torchrun, and is killed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    engine = Engine()

    def program() -> Program[None]:
        yield AllReduce(torch.ones(4))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        yield AllReduce(torch.ones(4))

    try:
        engine.run(program(), "unit 0 of 1 in step 0", torch.device("cpu"))
    except PeerError as error:
        pipe.send_bytes(json.dumps({"event": "ended", "said": str(error), "ranks": error.ranks}).encode())
    engine.close()


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_dead_rank_that_had_the_store_is_named(matrix: Matrix, port: int) -> None:
    endings: list[Ending] = matrix.fleet.run(wait_for_the_host, [(0, port), (1, port)], 20.0)
    assert [ending.exit_code for ending in endings] == [-signal.SIGKILL, 0], endings
    assert endings[1].message("ended")["ranks"] == [0]
    assert "store" in endings[1].message("ended")["said"]
