"""`every=H` behind DistributedDataParallel: periods are saved, flushed and judged in their middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.sync import StepPipeline
from multiproc.harness import Ranks
from multiproc.models import Mlp, batch
from multiproc.training import RATE, Plan, Run, differing, snapshot

EVERY, SAVED_AFTER, STEPS = 4, 10, 20


class Learning:
    def __init__(self, rank: int, settings: dict[str, Any]) -> None:
        self.rank, self.model = rank, Mlp()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.01)
        self.sync = gradsieve.attach(self.ddp, self.optimizer, every=EVERY, dense_if_faster=False, **settings)
        assert isinstance(self.sync.pipeline, StepPipeline)

    def train(self, begin: int, end: int) -> dict[str, Tensor]:
        for step in range(begin, end):
            inputs, labels = batch(step, self.rank)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.ddp(inputs), labels).backward()
            self.optimizer.step()
        return snapshot(self)


def uninterrupted(rank: int, settings: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    learning = Learning(rank, settings)
    end = learning.train(0, STEPS)
    return end, learning.sync.pipeline.step


def first_part(rank: int, settings: dict[str, Any], folder: Path) -> None:
    learning = Learning(rank, settings)
    learning.train(0, SAVED_AFTER)
    parts = {"model": learning.model, "optimizer": learning.optimizer, "sync": learning.sync}
    torch.save({name: part.state_dict() for name, part in parts.items()}, folder / f"{rank}.pt")


def second_part(rank: int, settings: dict[str, Any], folder: Path, forget: bool = False) -> dict[str, Tensor]:
    learning = Learning(rank, settings)
    stored = torch.load(folder / f"{rank}.pt", weights_only=True)
    learning.model.load_state_dict(stored["model"])
    learning.optimizer.load_state_dict(stored["optimizer"])
    learning.sync.load_state_dict(stored["sync"])
    if forget:
        learning.sync.pipeline.since = 0
    return learning.train(SAVED_AFTER, STEPS)


@pytest.fixture(scope="module")
def later() -> Any:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("settings", [{"scheme": "dense"}, {"bits": 0.5}, {"density": 0.02}], ids=str)
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


def flushed(rank: int, steps: int) -> list[dict[str, Tensor]]:
    """What was fed; the model that an evaluation sees before the flush, and that after it."""
    plan = Plan(scheme="topk", preset=gradsieve.Treatment(preview=1.0, every=EVERY))
    run = Run(rank, plan).train(steps)
    run.ddp.eval()
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, inputs: Any) -> None:
        seen.update({name: p.detach().clone() for name, p in module.named_parameters()})

    hook = run.model.register_forward_pre_hook(look)
    with torch.no_grad():
        run.ddp(plan.gradients(0, 0))
    hook.remove()
    run.sync.flush()
    run.sync.verify()
    after = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    return [run.seen.fed, seen, after]


@pytest.mark.parametrize("steps", [2, EVERY, EVERY + 1])
def test_a_flush_anywhere_in_a_period_brings_everything(two: Ranks, steps: int) -> None:
    answers = two.run(flushed, steps)
    assert differing(answers[0][1], answers[1][1]) == [], "an evaluation saw different models"
    assert differing(answers[0][2], answers[1][2]) == []
    for name in answers[0][0]:
        learnt = -RATE * (answers[0][0][name] + answers[1][0][name]) / 2
        assert torch.equal(answers[0][2][name].double(), learnt), f"{name}: something was lost or made up"
