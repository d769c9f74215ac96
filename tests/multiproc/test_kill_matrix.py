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
from gradsieve_tools.chaos.campaign import Campaign
from gradsieve_tools.chaos.fleet import DONE, PEER_FAILED, Ending, Fleet
from gradsieve_tools.chaos.kinds import SHORT_STOP, STOP
from gradsieve_tools.chaos.rank import Episode, be_rank
from gradsieve_tools.chaos.schedule import Chance
from gradsieve_tools.chaos.verdicts import HARMLESS, NAMED
from gradsieve_tools.emulation.stores import store_at


def chance(kind: str, rank: int, op: int) -> Chance:
    return Chance(0, "exdyna", kind, rank, step=1, op=op, delay=0.0, bit=0)


def test_every_survivor_names_the_rank_in_time_and_keeps_nothing() -> None:
    """A stop of half the deadline is no failure."""
    faults = [chance("SIGKILL", 0, 0), chance("exit 0", 2, 1), chance(STOP, 1, 1), chance(SHORT_STOP, 1, 0)]
    with Campaign(1, faults) as campaign:
        lines = list(campaign.run())
    assert [line.outcome for line in lines] == [NAMED] * 3 + [HARMLESS], lines
    assert campaign.recovered.total() == 3


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(be_rank.__module__)


def test_a_rank_with_fewer_batches_is_named_as_such(fleet: Fleet) -> None:
    store = ("127.0.0.1", (server := store_at("127.0.0.1")).port)
    lives = [
        (rank, Episode("exdyna", steps, 60.0, 1, store, "case", "", fresh=True, saves=False))
        for rank, steps in enumerate((6, 3, 6))
    ]
    endings = fleet.run(be_rank, lives, 20.0)
    del server
    assert [ending.exit_code for ending in endings] == [PEER_FAILED, DONE, PEER_FAILED]
    for rank in (0, 2):
        ended = endings[rank].message("ended")
        assert ended["ranks"] == [1]
        assert "rank 1 left after unit 1 of 2 in step 2" in ended["said"]
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


def test_a_dead_rank_that_had_the_store_is_named(fleet: Fleet, port: int) -> None:
    endings: list[Ending] = fleet.run(wait_for_the_host, [(0, port), (1, port)], 20.0)
    assert [ending.exit_code for ending in endings] == [-signal.SIGKILL, 0], endings
    assert endings[1].message("ended")["ranks"] == [0]
    assert "store" in endings[1].message("ended")["said"]
