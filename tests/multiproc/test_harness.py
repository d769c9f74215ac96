"""The harness sees what it is there to see: an exception, a death, a hang, a bad exit of any rank."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from multiproc.harness import RankFailure, Ranks


def _sum_of_ranks(rank: int) -> int:
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return int(total)


def _fails_on(rank: int, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"planted on {rank}")


@pytest.mark.parametrize("bad", [0, 1])
def test_an_exception_on_any_rank_fails_the_call_and_names_it(two: Ranks, bad: int) -> None:
    with pytest.raises(RankFailure, match=rf"rank {bad} raised\n(.*\n)+ValueError: planted on {bad}"):
        two.run(_fails_on, bad)
    assert two.run(_sum_of_ranks) == [1, 1], "the pool starts anew after a failure"


def _dies_on(rank: int, bad: int, number: int) -> None:
    if rank == bad:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_death_by_signal_of_any_rank_fails_the_call(two: Ranks, bad: int) -> None:
    with pytest.raises(RankFailure, match=f"rank {bad} ended with code -9"):
        two.run(_dies_on, bad, signal.SIGKILL)


def _sleeps_on_one(rank: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_a_hang_is_cut_off_with_the_stack_of_the_rank_that_hangs(two: Ranks) -> None:
    two.run(_sum_of_ranks)  # so that the limit is not spent on starting them
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)hang in _sleeps_on_one.*rank 1 hangs at.*_sleeps_on_one"):
        two.run(_sleeps_on_one, timeout=2.0)
    assert time.monotonic() - start < 10.0
    assert two.pids() == []
