"""Calls that all ranks have to make, made by some: an error on all ranks where others train on, a line in
every log where they wait for something else."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradsieve import GradsieveError
from gradsieve.comm import failures
from multiproc.harness import Ranks
from multiproc.outside import Lines
from multiproc.test_nothing_to_remember import Training

BUDGET = {"bits": 0.75, "density": None}
SETTINGS: dict[str, dict[str, Any]] = {
    "stripes": BUDGET,
    **{name: {"scheme": name, "density": 0.05} for name in ("topk", "exdyna", "oktopk", "spardl")},
}
SOON = 18.0
"""Seconds: about half of one, and many more on a busy machine. The time-out is twenty."""


def calls_of(run: Training, folder: Path) -> dict[str, Callable[[], None]]:
    sync = run.sync
    return {"flush()": sync.flush, "verify()": sync.verify, "save()": lambda: sync.save(folder)}


def alone(rank: int, call: str, folder: Path, settings: dict[str, Any]) -> tuple[str, str, float]:
    """What rank 0 and the others are told when rank 0 alone makes the call, and after how long."""
    run = Training(rank, **settings)
    for step in range(5):
        run.step(step)
    began = time.perf_counter()
    try:
        if rank == 0:
            calls_of(run, folder)[call]()
        for step in range(5, 10):
            run.step(step)
    except GradsieveError as error:
        return type(error).__name__, str(error), time.perf_counter() - began
    return "", "nothing was noticed", time.perf_counter() - began


@pytest.mark.parametrize("scheme", SETTINGS)
@pytest.mark.parametrize("call", ["verify()", "save()", "flush()"])
def test_a_call_on_one_rank_while_the_other_trains_is_told_on_both(
    two: Ranks, scheme: str, call: str, tmp_path: Path
) -> None:
    for rank, (kind, said, seconds) in enumerate(two.run(alone, call, tmp_path, SETTINGS[scheme])):
        assert kind == "MismatchError", said
        assert said.startswith(f"rank {rank}: rank 0"), said
        assert f"called {call} after step 5 while rank 1 went on training" in said
        assert "call it on every rank, or on none" in said
        assert seconds < SOON


def test_of_four_ranks_all_are_told(four: Ranks, tmp_path: Path) -> None:
    for kind, said, seconds in four.run(alone, "verify()", tmp_path, BUDGET):
        assert kind == "MismatchError", said
        assert re.search(
            r"rank 0( \(this one\))? called verify\(\) after step 5 while rank [123] went on", said
        )
        assert seconds < SOON


def verified_by_all(rank: int, steps: int) -> list[str]:
    """Ranks come to it one after the other, and go on at once."""
    said, run = Lines(), Training(rank, **BUDGET)
    for step in range(steps):
        run.step(step)
        time.sleep(0.4 * (rank == step % 2))
        run.sync.verify()
    return said.lines


def test_twin_all_ranks_call_it_and_none_is_blamed(two: Ranks) -> None:
    assert two.run(verified_by_all, 4) == [[], []]


def behind_a_barrier(rank: int, call: str, folder: Path, seconds: float) -> list[str]:
    """Rank 0 makes a call that the others make only after some time, which they spend in a barrier; rank 0's
    part in that comes from another thread."""
    said, run = Lines(), Training(rank, **BUDGET)
    other = dist.new_group(timeout=None)
    for step in range(6):
        run.step(step)
    arrival = _later(seconds, other) if rank == 0 else None
    if rank != 0:
        dist.barrier(group=other)
    calls_of(run, folder)[call]()
    if arrival is not None:
        arrival.join()
    return said.lines


def _later(seconds: float, group: Any) -> threading.Thread:
    def arrive() -> None:
        time.sleep(seconds)
        dist.barrier(group=group)

    thread = threading.Thread(target=arrive)
    thread.start()
    return thread


@pytest.mark.parametrize("call", ["flush()", "verify()", "save()"])
def test_who_is_waited_for_is_named_with_its_place_on_all_ranks(
    two: Ranks, call: str, tmp_path: Path
) -> None:
    waiting, absent = two.run(behind_a_barrier, call, tmp_path, 2.4)
    assert len(waiting) == len(absent) == 1, "said once"
    place = r"in barrier\(\) at test_calls_alone\.py:\d+"
    name = re.escape(call)
    what = rf"{name} after step 6 has waited [12]\.\d s for rank 1, which is {place}\."
    mend = rf"{name} waits for all ranks: call it on every rank, or on none"
    assert re.search(f"^rank 0: {what} {mend}$", waiting[0]), waiting
    assert re.search(
        rf"^rank 1: rank 0 has waited 1\.0 s in {name} after step 6 for this rank, which is {place}\. ",
        absent[0],
    ), absent


def test_twin_a_rank_that_comes_in_time_is_not_named(two: Ranks, tmp_path: Path) -> None:
    assert failures.LONG_CALL_SECONDS == 1.0
    assert two.run(behind_a_barrier, "flush()", tmp_path, 0.5) == [[], []]
