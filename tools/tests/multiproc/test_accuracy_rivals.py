"""torch's own hooks and torchft in `bench accuracy`: real ranks train as virtual ones do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradsieve_tools.bench.accuracy import measure as accuracy
from gradsieve_tools.bench.accuracy import rivals
from gradsieve_tools.bench.accuracy.measure import Case
from gradsieve_tools.bench.common import virtual
from gradsieve_tools.bench.rivals.base import RivalRun
from gradsieve_tools.bench.tasks import training as tasks
from gradsieve_tools.bench.tasks.data import Data, DataSet
from multiproc.harness import Ranks

TASK = "tiny"
STEPS = 25


def few_numbers() -> DataSet:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 40, generator=random)
    target = (inputs @ torch.randn(40, 3, generator=random)).argmax(1)
    whole = Data((inputs,), target)
    return DataSet(whole.take(slice(64)), whole.take(slice(64, None)), kind=target[:64])


def add_task() -> None:
    """In whichever process. Evaluated often, short as it is."""
    virtual.JUDGED_EVERY = 1
    tasks.TASKS[TASK] = replace(
        tasks.TASKS["mlp"],
        name=TASK,
        model=lambda: nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)),
        data=few_numbers,
        batch=16,
        metric="loss",
    )


def learn(_rank: int, sync: str) -> tuple[virtual.Course, int, int]:
    """The course, calls after a step, and elements that were all-reduced in the last step."""
    add_task()
    reduced: list[int] = []
    original, calls = dist.all_reduce, []

    def counted(tensor: torch.Tensor, *args: object, **settings: object) -> object:
        reduced.append(tensor.numel())
        return original(tensor, *args, **settings)

    dist.all_reduce = counted
    try:
        run = RivalRun(TASK, rivals.parse(sync), seed=3, world=dist.get_world_size(), steps=STEPS)
        course = rivals.learn(run, lambda: calls.append(1))
    finally:
        dist.all_reduce = original
    return course, len(calls), sum(reduced[-3:])


@pytest.fixture(scope="module")
def dense() -> virtual.Course:
    often = virtual.JUDGED_EVERY
    add_task()
    try:
        return accuracy.train(Case(task=TASK, sync="dense", world=2, seed=3, steps=STEPS), lambda: None)
    finally:
        del tasks.TASKS[TASK]
        virtual.JUDGED_EVERY = often


def test_fp16_on_real_ranks_is_dense_on_virtual_ones_but_for_rounding(
    two: Ranks, dense: virtual.Course
) -> None:
    (course, calls, _), (other, others_calls, _) = two.run(learn, "fp16")
    assert course.values == pytest.approx(dense.values, rel=5e-3)
    assert course.values[-1] < 0.9 * course.values[0]
    assert course.steps == dense.steps
    assert (calls, others_calls) == (STEPS, 0)
    assert other.values == []  # rank 0 is the one that is evaluated


@pytest.mark.nightly
def test_powersgd_learns_and_moves_what_is_said_of_it(two: Ranks, dense: virtual.Course) -> None:
    answers = {rank: two.run(learn, f"powersgd:rank={rank}")[0] for rank in (1, 10)}
    shapes = [(64, 40), (64,), (64,), (64,), (3, 64), (3,)]
    for rank, (course, _, elements) in answers.items():
        assert course.values[-1] < 0.9 * course.values[0]
        assert 4.0 * elements == rivals.powersgd_bytes(shapes, rank, world=2)
        # Two steps send all.
        assert course.steps[:2] == [2, 3]
        assert course.values[0] == pytest.approx(dense.values[0], rel=1e-5)
        assert course.values[1] != pytest.approx(dense.values[1], rel=1e-5)
    assert answers[1][0].bytes_sent < answers[10][0].bytes_sent < dense.bytes_sent


def nothing() -> None:
    """After a step; spawned ranks have to find it by name."""


def ended(sync: str) -> float:
    course = accuracy.train(Case(task="recommender", sync=sync, world=2, steps=6), nothing)
    return course.values[-1]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["local-sgd", "diloco"])
def test_what_torchft_ships_ends_as_its_namesake_on_virtual_ranks(name: str) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed")
    theirs = ended(f"torchft-{name}:every=2")
    assert theirs == pytest.approx(ended(f"{name}:every=2"), rel=1e-6)
    assert theirs != pytest.approx(ended(f"{name}:every=3"), rel=1e-6)  # the period matters
