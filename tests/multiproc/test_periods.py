"""`every=H` behind DistributedDataParallel: periods are saved, flushed and evaluated in their middle."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradsieve
from gradsieve.pipeline import StepPipeline
from multiproc.harness import Ranks
from multiproc.resumable import Resumable
from multiproc.training import Plan, Run, differing

EVERY, SAVED_AFTER, STEPS = 4, 10, 20


class Learning(Resumable):
    def __init__(self, rank: int, settings: dict[str, Any]) -> None:
        super().__init__(
            rank,
            partial(torch.optim.AdamW, lr=0.01),
            **{"exchange": gradsieve.Steps(every=EVERY), **settings},
        )
        assert isinstance(self.sync.pipeline, StepPipeline)


def uninterrupted(rank: int, settings: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    learning = Learning(rank, settings)
    end = learning.train(0, STEPS)
    return end, learning.sync.pipeline.step


def first_part(rank: int, settings: dict[str, Any], folder: Path) -> None:
    learning = Learning(rank, settings)
    learning.train(0, SAVED_AFTER)
    learning.save(folder / f"{rank}.pt")


def second_part(rank: int, settings: dict[str, Any], folder: Path, forget: bool = False) -> dict[str, Tensor]:
    learning = Learning(rank, settings)
    learning.load(folder / f"{rank}.pt", with_sync=True)
    if forget:
        learning.sync.pipeline.since = 0
    return learning.train(SAVED_AFTER, STEPS)


@pytest.fixture(scope="module")
def later() -> Any:
    with Ranks(2) as ranks:
        yield ranks


LASTING = gradsieve.Steps(every=EVERY, overlap=3)
"""Begun in step 8 an exchange is taken over in step 10, before the checkpoint."""


@pytest.mark.parametrize(
    "settings",
    [{"scheme": "dense"}, {"bits": 0.5}, {"density": 0.02}, {"bits": 0.5, "exchange": LASTING}],
    ids=str,
)
def test_resumed_in_the_middle_of_a_period_it_goes_on_bit_for_bit(
    two: Ranks, later: Ranks, settings: dict[str, Any], tmp_path: Path
) -> None:
    whole = two.run(uninterrupted, settings)
    two.run(first_part, settings, tmp_path)
    resumed = later.run(second_part, settings, tmp_path)
    for rank in range(2):
        assert differing(whole[rank][0], resumed[rank]) == []
        assert whole[rank][1] == STEPS // EVERY
    shown = [
        {name: part for name, part in each[0].items() if name.startswith("parameter/")} for each in whole
    ]
    assert differing(*shown) == [], "ranks show different models"
    if "scheme" in settings:  # twin
        assert differing(whole[0][0], later.run(second_part, settings, tmp_path, forget=True)[0])


def saved_and_resumed(
    rank: int, every: int, overlap: int, saved_after: int, folder: Path, goes_on: bool
) -> tuple[dict[str, Tensor], bool]:
    """The training that saves goes on, or another one does from its checkpoint; whether one was pending."""
    settings: dict[str, Any] = {"bits": 0.5, "exchange": gradsieve.Steps(every=every, overlap=overlap)}
    learning, path, pending = Learning(rank, settings), folder / f"{rank}.pt", False
    if goes_on:
        for step in range(saved_after):
            learning.step(step)
        pending = learning.sync.runner.pending is not None
        learning.save(path)
    else:
        learning.load(path, with_sync=True)
    return learning.train(saved_after, 12), pending


@pytest.mark.parametrize(("every", "overlap"), [(2, 2), (3, 2), (3, 3), (4, 3)])
@pytest.mark.parametrize("saved_after", [3, 4, 5, 6])
def test_saved_while_an_exchange_is_pending_it_resumes_bit_for_bit(
    two: Ranks, tmp_path: Path, every: int, overlap: int, saved_after: int
) -> None:
    goes_on, resumed = (
        two.run(saved_and_resumed, every, overlap, saved_after, tmp_path, each) for each in (True, False)
    )
    for (end, pending), (other, _) in zip(goes_on, resumed, strict=True):
        assert pending == (saved_after % every < overlap - 1)
        assert differing(end, other) == []


def looked_at_in_the_middle(rank: int, late: int) -> tuple[list[bool], list[dict[str, Tensor]]]:
    """After each step, whether an exchange is under way; and the model that rank 0 alone looks at then."""
    plan = Plan(scheme="topk", exchange=gradsieve.Steps(every=EVERY, overlap=late), preview=1.0)
    run, under_way, seen = Run(rank, plan), [], []
    for step in range(2 * EVERY):
        run.train(1)
        under_way.append(run.sync.runner.pending is not None)
        if rank == 0 or step == 2 * EVERY - 1:
            seen.append({name: part.clone() for name, part in run.model.state_dict().items()})
    run.sync.flush()
    run.sync.verify()
    return under_way, seen


@pytest.mark.parametrize(("late", "lasting", "moving"), [(1, [], [3, 7]), (3, [3, 4, 7], [5])])
def test_an_exchange_lasts_as_long_as_it_may_and_who_looks_does_not_end_it(
    two: Ranks, late: int, lasting: list[int], moving: list[int]
) -> None:
    """Exchanges begin in steps 3 and 7."""
    (under_way, seen), (elsewhere, last) = two.run(looked_at_in_the_middle, late)
    assert [step for step, is_it in enumerate(under_way) if is_it] == lasting
    assert under_way == elsewhere
    assert [step for step in range(1, 2 * EVERY) if differing(seen[step - 1], seen[step])] == moving
    assert differing(seen[-1], last[-1]) == [], "ranks share different models"
