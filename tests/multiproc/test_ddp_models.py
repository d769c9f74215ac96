"""Behind DDP, models that are not plain: frozen, of mixed types, channels last, with tied weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradsieve.schemes import SCHEMES
from multiproc.harness import Ranks
from multiproc.models import UNIT, Whole
from multiproc.training import (
    Plan,
    Run,
    Seen,
    check_applied,
    check_laws,
    check_nothing_lost,
    check_replicas,
    usual,
)

every_scheme = pytest.mark.parametrize("scheme", usual())


def train_frozen(rank: int, plan: Plan) -> tuple[Seen, list[str]]:
    """Also: the names that changed."""
    model = Whole(plan.shapes)
    for place in (0, 4):
        model.tensors[place].requires_grad_(False)
    seen = Run(rank, plan, model).train().report()
    return seen, [name for name, part in seen.parameters.items() if int(part.count_nonzero())]


@every_scheme
def test_frozen_parameters_stay_and_the_rest_keeps_the_laws(two: Ranks, scheme: str) -> None:
    enough = 0.5 if SCHEMES[scheme].round_robin else 0.05  # within its few steps
    seen, changed = zip(*two.run(train_frozen, Plan(scheme, density=enough)), strict=True)
    check_laws(seen)
    assert "tensors.0" not in seen[0].residuals
    assert changed[0] == [f"tensors.{place}" for place in (1, 2, 3, 5, 6)]


MIXED = Plan(
    shapes=((64, 48), (40, 50), (48, 50), (45, 40), (30,), (20,), (64, 20)),
    dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bfloat16, torch.float64),
)


def train(rank: int, plan: Plan) -> Seen:
    return Run(rank, plan).train().report()


@every_scheme
@pytest.mark.parametrize("views", [False, True])
def test_every_type_keeps_the_laws_beside_the_others(two: Ranks, scheme: str, views: bool) -> None:
    """Means are multiples of UNIT / 2 below 2^8 of them: even bfloat16 holds them exactly."""
    seen = two.run(train, replace(MIXED, scheme=scheme, ddp={"gradient_as_bucket_view": views}))
    check_replicas(seen)
    check_nothing_lost(seen)
    check_applied([_only_wide(each) for each in seen])
    kinds = {name: part.dtype for name, part in seen[0].residuals.items()}
    if kinds:
        assert kinds["tensors.3"] == torch.float64
        assert kinds["tensors.1"] == kinds["tensors.2"] == torch.float32, "accumulate in at least float32"


def _only_wide(seen: Seen) -> Seen:
    """Parameters of 16 bits round when they are updated."""
    wide = {name: part for name, part in seen.applied.items() if seen.parameters[name].itemsize >= 4}
    return replace(seen, applied=wide)


CONVOLUTION = Plan(shapes=((32, 8, 3, 5), (32,), (16, 32, 3, 3)))


class ChannelsLast(Whole):
    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__(shapes)
        self.to(memory_format=torch.channels_last)


def train_convolution(
    rank: int, plan: Plan, kind: Callable[..., nn.Module], flush: bool = False
) -> tuple[Seen, list[tuple[int, ...]]]:
    """Also: the strides of the gradients."""
    run = Run(rank, plan, kind(plan.shapes)).train()
    strides = [parameter.grad.stride() for parameter in run.model.parameters()]
    if flush:
        run.sync.flush()
        run.apply()
    return run.report(), strides


@every_scheme
@pytest.mark.parametrize(
    ("flush", "views"), [(False, True), (True, False)], ids=["viewed", "copied and flushed"]
)
def test_channels_last_keeps_the_laws_element_by_element(
    two: Ranks, scheme: str, flush: bool, views: bool
) -> None:
    plan = replace(CONVOLUTION, scheme=scheme, ddp={"gradient_as_bucket_view": views})
    seen, strides = zip(*two.run(train_convolution, plan, ChannelsLast, flush), strict=True)
    assert strides[0][0] == (120, 1, 40, 8), "the gradient does not lie channels last: the test shows nothing"
    check_laws(seen)
    if flush:
        assert not any(int(part.count_nonzero()) for part in seen[0].residuals.values())


class Tied(nn.Module):
    """Embedding and head share one matrix, so its gradient has two parts; whole numbers again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 40)
        self.head = nn.Linear(40, 60)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        rows = self.embedding(torch.arange(60))
        return (
            (rows * gradients[0]).sum() + (self.head.weight * gradients[0] + 0).sum() + self._bias(gradients)
        )

    def _bias(self, gradients: Sequence[Tensor]) -> Tensor:
        return (self.head.bias * gradients[1]).sum()


def train_tied(rank: int, plan: Plan) -> Seen:
    """What `fed` counts once, the two uses of the matrix produce twice."""
    run = Run(rank, plan, Tied()).train()
    run.seen.fed["embedding.weight"] *= 2
    assert [*run.seen.fed] == ["embedding.weight", "head.bias"]
    return run.report()


@every_scheme
def test_tied_weights_are_exchanged_once(two: Ranks, scheme: str) -> None:
    seen = two.run(train_tied, Plan(scheme, shapes=((60, 40), (60,))))
    check_laws(seen)
    assert float(seen[0].applied["embedding.weight"].abs().max()) > 8 * UNIT
