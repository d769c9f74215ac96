"""1,000 exchanges over 8 units, all queued before the first has ended: they end in order, and add up."""

from __future__ import annotations

import queue
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsieve import Gradients, kernels
from gradsieve.comm.engine import Engine
from gradsieve.pipeline.gradients import GradientPipeline
from gradsieve_tools.specs import parse
from multiproc.harness import Ranks

UNITS, STEPS, N = 8, 125, 64
CPU = torch.device("cpu")


class Overtaking(queue.SimpleQueue):  # type: ignore[type-arg]
    """The job that was put in at place `where` is handed out after the one behind it."""

    where = UNITS + 3

    def __init__(self) -> None:
        super().__init__()
        self._place, self._held = 0, None

    def put(self, job: Any, *_: Any, **__: Any) -> None:
        self._place += 1
        if self._place == self.where:
            self._held = job
            return
        super().put(job)
        if self._held is not None:
            job, self._held = self._held, None
            super().put(job)


def gradients_of(rank: int, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Whole numbers, so that sums are exact."""
    source = torch.Generator().manual_seed(rank)
    return [
        {f"p{unit}": torch.randint(-8, 9, (N,), generator=source).float() for unit in range(UNITS)}
        for _ in range(steps)
    ]


@dataclass
class Seen:
    """By one rank."""

    order: list[int]
    """In which the exchanges ended."""
    failed: list[str]
    applied: dict[str, Tensor]
    """The sum of all updates."""
    left: dict[str, Tensor]


def queued(rank: int, steps: int = STEPS, overtaken_on: int = -1) -> Seen:
    engine = Engine()
    if rank == overtaken_on:
        before, engine._jobs = engine._jobs, Overtaking()
        before.put(lambda: None)  # at which the thread waits
    named = {f"p{unit}": torch.zeros(N) for unit in range(UNITS)}
    treatment = Gradients(small=0)
    cap = 4 * N / 2**20
    with kernels.using("torch"):
        pipeline = GradientPipeline(named, (), parse("topk", 0.25), treatment, rank, 2, cap)
        names = [unit.slots[0].name for unit in pipeline.units]
        assert sorted(names) == sorted(named), "one unit each"
        given, order, futures = gradients_of(rank, steps), list[int](), list[Future[None]]()
        for step in given:
            pending = pipeline.begin(gradients=step)
            for index in range(len(names)):
                place = len(futures)
                future = engine.submit(pipeline.program(pending, index), f"unit {index}", CPU)
                future.add_done_callback(lambda _, place=place: order.append(place))
                futures.append(future)
        wait(futures)
    engine.close()  # whoever still waits for this rank is told
    failed = [str(error) for future in futures if (error := future.exception()) is not None]
    applied = {name: sum((step[name] for step in given), torch.zeros(N)) for name in names}
    left = dict(zip(names, pipeline.residuals(), strict=True))
    return Seen(order, failed, applied, left)


def test_a_thousand_queued_exchanges_end_in_order_and_lose_nothing(two: Ranks) -> None:
    one, other = two.run(queued)
    assert one.order == other.order == list(range(UNITS * STEPS))
    assert one.failed == other.failed == []
    given = [gradients_of(rank) for rank in range(2)]
    for name in one.applied:
        assert torch.equal(one.applied[name], other.applied[name])
        whole = sum((step[name] for steps in given for step in steps), torch.zeros(N))
        assert torch.equal(whole, 2 * one.applied[name] + one.left[name] + other.left[name])
        assert one.left[name].any(), "without anything left the law shows little"


def test_one_that_overtakes_another_is_noticed_by_all(two: Ranks) -> None:
    """Twin: on one of the ranks only, in the last of two steps."""
    one, other = two.run(queued, 2, overtaken_on=1)
    assert one.failed
    assert other.failed
