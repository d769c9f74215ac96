"""What a user gets who asks for nothing, or for so many bits; and how long steps are then."""

from __future__ import annotations

import copy
import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.pipeline import StepPipeline
from gradsieve.pipeline.budget import ALL, Timer
from gradsieve.schemes import Stripes
from multiproc.harness import Ranks
from multiproc.models import Mlp, batch
from multiproc.outside import Lines

RATE = 0.01


class Learning:
    """With AdamW, every rank on batches of its own."""

    def __init__(self, rank: int, **asked: Any) -> None:
        self.rank, self.model = rank, Mlp()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        self.ddp = DistributedDataParallel(self.model)
        self.sync = gradsieve.attach(self.ddp, self.optimizer, **asked)
        assert isinstance(self.sync.pipeline, StepPipeline) == ("exchange" not in asked)
        self.pipeline: Any = self.sync.pipeline

    def backward(self, step: int) -> None:
        inputs, labels = batch(step, self.rank)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.ddp(inputs), labels).backward()

    def train(self, begin: int, end: int) -> Learning:
        for step in range(begin, end):
            self.backward(step)
            self.optimizer.step()
        return self

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def asking_for_nothing(rank: int) -> tuple[list[str], dict[str, float], list[Tensor], list[Tensor]]:
    """Until there is a choice, saved then; and the same steps once more, of a run that has loaded it."""
    lines = Lines(logging.INFO)
    run = Learning(rank).train(0, ALL + 1)
    run.sync.runner.complete()
    stored = {
        "model": {name: part.clone() for name, part in run.model.state_dict().items()},
        "optimizer": copy.deepcopy(run.optimizer.state_dict()),
        "sync": {key: part.clone() for key, part in run.sync.state_dict().items()},
    }
    figures = run.pipeline.figures()
    run.train(ALL + 1, ALL + 9)
    run.sync.flush()
    run.sync.close()
    with mock.patch.object(Timer, "gather", side_effect=AssertionError("it is timed again")):
        again = Learning(rank)
        again.model.load_state_dict(stored["model"])
        again.optimizer.load_state_dict(stored["optimizer"])
        again.sync.load_state_dict(stored["sync"])
        again.train(ALL + 1, ALL + 9)
    assert again.pipeline.figures()["budget"] == figures["budget"]
    again.sync.flush()
    logging.getLogger("gradsieve").removeHandler(lines)
    return list(lines.lines), figures, run.weights, again.weights


def test_who_asks_for_nothing_gets_a_budget_that_is_chosen_once(two: Ranks) -> None:
    """Alike on all ranks, logged as it can be repeated, kept in a checkpoint, and never timed again: a run
    that is resumed ends with the same bits."""
    (lines, first, weights, resumed), (silent, second, others, _) = two.run(asking_for_nothing)
    assert first["budget"] == second["budget"] >= 0.15
    assert first["every"] == second["every"] >= 1
    said = [line for line in lines if "from here on" in line]
    assert f"bits={first['budget']:g}, exchange=gradsieve.Steps(every={first['every']:.0f}" in said[0]
    assert not [line for line in silent if "from here on" in line]
    assert all(map(torch.equal, weights, others))
    assert all(map(torch.equal, weights, resumed))


def with_bits(rank: int, bits: float) -> tuple[float, list[Tensor]]:
    run = Learning(rank, bits=bits).train(0, 20)
    sent = run.sync.metrics()["bits"]
    run.sync.flush()
    return sent, run.weights


def test_so_many_bits_are_sent_and_the_same_run_gives_the_same_bits_again(two: Ranks) -> None:
    once, again = (two.run(with_bits, 0.5)[0] for _ in range(2))
    assert 0.2 < once[0] <= 0.7  # stretches are whole numbers of elements
    assert all(map(torch.equal, once[1], again[1]))


def of_gradients(rank: int, **asked: Any) -> tuple[float, Tensor, Tensor]:
    run = Learning(rank, exchange=gradsieve.Gradients(small=0), **asked)
    start = torch.cat([weight.flatten() for weight in run.weights])
    sent = run.train(0, 20).sync.metrics()["bits"]
    end = torch.cat([weight.flatten() for weight in run.weights])
    return sent, end, end - start


def test_gradients_in_four_bits_end_near_dense_on_all_ranks(two: Ranks) -> None:
    (_, dense, way), _ = two.run(of_gradients, scheme="dense")
    (sent, four_bits, _), (_, others, _) = two.run(of_gradients, bits=8)
    assert 3.9 < sent < 4.5  # a half of 8: of two ranks each keeps its own half
    assert torch.equal(four_bits, others)
    (_, signs, _), _ = two.run(of_gradients, scheme=Stripes(density=1.0, values="sign"))
    assert (four_bits - dense).norm() < 0.3 * way.norm() < (signs - dense).norm()


def noisy(rank: int) -> tuple[float, float, float]:
    """Steps by noise alone: each rank's own way is as long as the rate says, times 1/sqrt(rho)."""
    run = Learning(rank, bits=2.0)
    source = torch.Generator().manual_seed(rank)
    for step in range(60):
        run.backward(step)
        for parameter in run.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=source)
        run.optimizer.step()
    run.backward(60)
    own = torch.cat([part.clone() for part in run.pipeline.models.own.values()])
    for parameter in run.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=source)
    run.optimizer.step()
    moved = torch.cat(list(run.pipeline.models.own.values())) - own
    return run.pipeline.rho, float(moved.square().mean().sqrt()), run.optimizer.param_groups[0]["lr"]


def test_where_noise_rules_steps_of_adam_are_longer_by_the_root_of_the_ranks(two: Ranks) -> None:
    (rho, moved, rate), (other, _, _) = two.run(noisy)
    assert rho == other
    assert 0.5 <= rho < 0.6
    assert rate == RATE, "the user's rate is the user's again"
    usual = RATE * (0.1 / 1.9) ** 0.5  # root mean square of a step of Adam by noise
    assert moved == pytest.approx(usual / rho**0.5, rel=0.35)  # what was folded meanwhile is in it too


def clipped(rank: int) -> tuple[float, float, float, float]:
    run = Learning(rank, bits=0.5).train(0, 20)
    run.backward(20)
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    before = float(torch.cat([g.flatten() for g in gradients]).norm())
    norm = float(run.sync.clip_grad_norm_(1e-3))
    after = float(torch.cat([g.flatten() for g in gradients]).norm())
    return run.pipeline.rho, before, norm, after


def test_clipping_means_the_norm_that_the_mean_of_all_ranks_would_have(two: Ranks) -> None:
    for rho, before, norm, after in two.run(clipped):
        assert norm == pytest.approx(before * rho**0.5)
        assert after == pytest.approx(1e-3 / rho**0.5, rel=1e-3)


def bits_by_step(rank: int, steps: int, **settings: Any) -> list[tuple[float, float]]:
    """In the mean over a turn, and of the step alone; then after a flush."""
    torch.manual_seed(0)
    model = nn.Linear(200, 600)
    ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.01)
    sync = gradsieve.attach(ddp, optimizer, **settings)
    seen = []
    for step in range(steps + 1):
        if step == steps:
            sync.flush()
        else:
            optimizer.zero_grad()
            ddp(torch.randn(4, 200)).square().mean().backward()
            optimizer.step()
        figures = sync.metrics()
        seen.append((figures["bits"], figures["bits_of_step"]))
    return seen


def test_bits_are_a_mean_and_not_one_steps(two: Ranks) -> None:
    for seen in two.run(bits_by_step, 50, bits=0.75):
        turns = seen[19:-1]
        assert all(bits == pytest.approx(0.75, rel=0.05) for bits, _ in turns)
        assert max(alone for _, alone in turns) > 1.3 * min(alone for _, alone in turns), "the twin"


def test_a_flush_is_no_part_of_the_mean(two: Ranks) -> None:
    for seen in two.run(bits_by_step, 6, bits=0.75):
        (before, _), (flushed, dense) = seen[-2:]
        assert dense > 30
        assert flushed == before
