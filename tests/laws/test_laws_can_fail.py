"""Each law of `gradsieve.testing` is red on a scheme that breaks it, and green on an honest one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradsieve.schemes.base import Scheme
from gradsieve.testing.gradients import Source
from gradsieve.testing.laws import (
    check_is_dense_sum,
    check_nothing_lost,
    same_bits,
)
from gradsieve.testing.ranks import Round, VirtualRanks
from laws import toys

N, WORLD = 32, 3
Check = Callable[[Round], None]


def rounds_of(scheme: Scheme[Any], check: Check, kind: str = "normal", steps: int = 4) -> VirtualRanks:
    fleet = VirtualRanks(scheme, [N], WORLD)
    for round_ in fleet.advance(Source(kind, (N,)), steps):
        check(round_)
    return fleet


def test_check_of_the_dense_sum_flags_a_sum_in_another_order() -> None:
    def reversed_ranks(round_: Round) -> None:
        shuffled = Round(**{**round_.__dict__, "accs_before": round_.accs_before[::-1]})
        check_is_dense_sum(shuffled)

    with pytest.raises(AssertionError, match="not the dense sum"):
        rounds_of(toys.Toy(density=1.0), reversed_ranks)


def test_check_of_a_run_flags_a_residual_that_was_dropped() -> None:
    source = Source("integers", (N,))
    gradients, updates = torch.zeros(N), torch.zeros(N)
    fleet = VirtualRanks(toys.Toy(), [N], WORLD)
    for round_ in fleet.advance(source, 4):
        updates += round_.outcomes[0].update.to_dense()
        gradients += sum(source(round_.step, rank, 0) for rank in range(WORLD))
    residuals = torch.stack([buckets[0] for buckets in fleet.residuals]).sum(0)
    check_nothing_lost(gradients, updates, residuals, torch.zeros(N))
    with pytest.raises(AssertionError, match="lost or made up"):
        check_nothing_lost(gradients, updates, torch.zeros(N), torch.zeros(N))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1, 2]), torch.tensor([1])),
        (0.0, -0.0),
        ([1, 2], [1]),
        (1, 1.0),
        (toys.State(torch.ones(1)), toys.State(torch.zeros(1))),
    ],
)
def test_same_bits_tells_apart_what_equality_does_not(left: Any, right: Any) -> None:
    assert not same_bits(left, right)
    assert same_bits(left, left)
    assert same_bits([float("nan"), torch.tensor([torch.nan])], [float("nan"), torch.tensor([torch.nan])])
