"""Replicas that differ by one bit are found, by hand and in training, and the rank that differs is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

import gradsieve
from gradsieve import DivergenceError, runner
from gradsieve.schemes import SCHEMES
from multiproc.harness import Ranks
from multiproc.outside import Lines
from multiproc.training import Plan, Run, registered, usual

every_scheme = pytest.mark.parametrize("scheme", usual())
with_threshold = pytest.mark.parametrize(
    "scheme", [name for name in registered() if hasattr(SCHEMES[name]().begin(4096, 4), "threshold")]
)
ODD = 2


@torch.no_grad()
def a_parameter(run: Run) -> None:
    """The smallest change there is, in the last element."""
    weight = run.model.tensors[-1].view(-1)
    weight[-1] = torch.nextafter(weight[-1], torch.tensor(9.0))


@torch.no_grad()
def two_parameters_exchanged(run: Run) -> None:
    weight = run.model.tensors[0].view(-1)
    here = int((weight != weight[0]).nonzero()[0])
    weight[[0, here]] = weight[[here, 0]]


@torch.no_grad()
def a_sign(run: Run) -> None:
    weight = run.model.tensors[3].view(-1)
    weight[int(weight.nonzero()[0])] *= -1


def a_threshold(run: Run) -> None:
    last = len(run.sync.pipeline.selected) - 1
    state = run.sync.pipeline.states[last]
    nudged = float(torch.nextafter(torch.tensor(state.threshold, dtype=torch.float64), torch.tensor(9.0)))
    assert nudged != state.threshold
    run.sync.pipeline.states[last] = replace(state, threshold=nudged)


def the_step(run: Run) -> None:
    run.sync.pipeline.step += 1


def nothing(run: Run) -> None:
    pass


def verify_after(rank: int, plan: Plan, change: Callable[[Run], None]) -> str | None:
    """What verify() says after one rank was changed."""
    run = Run(rank, plan).train()
    run.sync.verify()
    if rank == ODD:
        change(run)
    try:
        run.sync.verify()
    except DivergenceError as error:
        return str(error)
    return None


@every_scheme
@pytest.mark.parametrize("change", [a_parameter, two_parameters_exchanged, a_sign, the_step])
def test_a_rank_that_differs_is_named_by_all(four: Ranks, scheme: str, change: Callable[[Run], None]) -> None:
    for rank, said in enumerate(four.run(verify_after, Plan(scheme), change)):
        assert said is not None, f"rank {rank} saw nothing"
        assert said.startswith(f"rank {rank}: ")
        assert "stand ranks [2]" in said
        assert "after step" in said


@with_threshold
def test_a_threshold_that_differs_is_found(four: Ranks, scheme: str) -> None:
    for said in four.run(verify_after, Plan(scheme), a_threshold):
        assert said is not None
        assert "stand ranks [2]" in said


def test_of_two_ranks_none_is_accused(pool: Callable[[int], Ranks]) -> None:
    def said(answers: list[str | None]) -> str:
        assert len({str(answer).partition(": ")[2] for answer in answers}) == 1
        return str(answers[0])

    assert "no majority" in said(pool(2).run(verify_on_two, Plan()))


def verify_on_two(rank: int, plan: Plan) -> str | None:
    return verify_after(rank + 1, plan, a_parameter) if rank else verify_after(0, plan, nothing)


def train_after(rank: int, plan: Plan, change: Callable[[Run], None], every: int) -> tuple[str | None, int]:
    """What training says after one rank was changed in step 3, and after how many steps."""
    with mock.patch.object(runner, "VERIFY_EVERY", every):
        run = Run(rank, plan).train(3)
        if rank == ODD:
            change(run)
        try:
            run.train(9)
        except DivergenceError as error:
            return str(error), run.sync.pipeline.step
    return None, run.sync.pipeline.step


@every_scheme
def test_training_stops_at_the_next_comparison(four: Ranks, scheme: str) -> None:
    for said, step in four.run(train_after, Plan(scheme), a_sign, 5):
        assert said is not None
        assert "replicas differ after step 5" in said
        assert "stand ranks [2]" in said
        assert step == 5


def a_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 2


def lines_after(rank: int, change: Callable[[Run], None]) -> list[str]:
    log = Lines()
    ended = train_after(rank, Plan(exchange=gradsieve.Steps()), change, 5)
    assert ended == (None, 12), "a rank that skips a step alone may skip its schedule's"
    return log.lines


def test_a_learning_rate_that_differs_is_named_on_one_rank(four: Ranks) -> None:
    first, *others = four.run(lines_after, a_rate)
    assert len(first) == 2
    assert "step 5: learning rates differ between ranks; against the majority stand ranks [2]" in first[0]
    assert others == [[]] * 3
    assert four.run(lines_after, nothing) == [[]] * 4
