"""A whole exchange of a pipeline, with what rides along forged: refused, or finite afterwards."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache

import pytest
import torch
from torch import Tensor

from gradsieve.comm.ops import AllReduce
from gradsieve.errors import MismatchError
from gradsieve.pipeline.frame import CHECKSUM_WORDS
from gradsieve.pipeline.tags import WORDS
from gradsieve_tools.fuzz.entry_points.exchanges import WORLD, Heard, as_bytes, replayed
from gradsieve_tools.fuzz.entry_points.pipelines import Rank, gradients, steps, trained, with_budget

Victim = tuple[Rank, list[Heard]]


@cache
def victim(scheme: str, budget: bool = False, gradient: bool = False) -> Victim:
    """After three honest steps."""
    build = gradients if gradient else with_budget if budget else steps
    return trained([build(scheme, rank) for rank in range(WORLD)])


def attacked(target: Victim, change: Callable[[Tensor], object]) -> Rank:
    """The victim after a step in which the sum that rides along was changed in place."""
    rank, heard = deepcopy(target[0]), target[1]
    number = next(place for place, each in enumerate(heard) if isinstance(each.op, AllReduce))
    frame = bytearray(as_bytes(heard[number].reply))
    change(torch.frombuffer(frame, dtype=heard[number].reply.dtype))
    pending = rank.begin()
    replayed(rank.pipeline.program(pending, 0), heard, number, frame)
    rank.pipeline.finish(pending)
    rank.check()
    return rank


@pytest.mark.parametrize("gradient", [False, True])
def test_unforged_it_is_a_step(gradient: bool) -> None:
    target = victim("exdyna", gradient=gradient)
    after = attacked(target, lambda ride: ride)
    assert after.pipeline.step == target[0].pipeline.step + 1


def test_another_tag_is_found_out() -> None:
    with pytest.raises(MismatchError):
        attacked(victim("stripes", budget=True), lambda ride: ride[-CHECKSUM_WORDS - WORDS].add_(1))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_a_sum_that_is_not_finite_or_huge_leaves_what_is_finite(gradient: bool, value: float) -> None:
    attacked(victim("exdyna", gradient=gradient), lambda ride: ride[0].fill_(value))


def test_a_memory_that_is_not_finite_is_seen() -> None:
    """The twin: `check` finds what it is there for."""
    rank = deepcopy(victim("exdyna")[0])
    next(iter(rank.pipeline.memories().values())).fill_(torch.nan)
    with pytest.raises(AssertionError, match="not finite"):
        rank.check()
