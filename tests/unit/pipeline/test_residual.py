"""Residuals that change only at commit, riders in another's all-reduce, and the finiteness of a vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.ops import AllGather, AllReduce, Meter
from gradsieve.kernels import is_finite
from gradsieve.pipeline.frame import CHECKSUM_WORDS, Checksum, Frame, Timeline
from gradsieve.pipeline.gradients import Residual
from gradsieve.types import Program, Sparse
from gradsieve.units import make_units

# -- residual -----------------------------------------------------------------------------------------


def residual(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Residual:
    named = [(f"p{place}", torch.empty(shape, dtype=dtype)) for place, shape in enumerate(shapes)]
    (unit,) = make_units(named, 1 << 30, small=1024)
    return Residual(unit)


def commit(one: Residual, spent: Sparse) -> None:
    one.commit(spent)


MATRIX = (32, 40)
SIZE = 32 * 40


def ramp(factor: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(SIZE) * factor).to(dtype)


def test_commit_keeps_what_was_not_spent() -> None:
    one = residual(MATRIX)
    acc, _ = one.accumulate({"p0": ramp()})
    spent = torch.tensor([3, 5])
    commit(one, Sparse(spent, acc[spent].clone(), SIZE))
    left = ramp()
    left[spent] = 0
    assert torch.equal(one.kept, left)
    assert torch.equal(one.accumulate({"p0": ramp()})[0], left + ramp())


def test_a_step_that_is_not_committed_leaves_no_trace() -> None:
    one = residual(MATRIX)
    one.accumulate({"p0": ramp()})
    commit(one, Sparse(torch.tensor([0]), torch.zeros(1), SIZE))
    before = one.kept.clone()
    one.accumulate({"p0": ramp(float("nan"))})
    one.accumulate({"p0": ramp(7.0)})
    assert torch.equal(one.kept, before)
    assert torch.equal(one.accumulate({"p0": ramp()})[0], before + ramp()), "an earlier attempt shows"


def test_without_a_usable_gradient_the_residual_alone_takes_part() -> None:
    one = residual(MATRIX)
    one.accumulate({"p0": ramp()})
    commit(one, Sparse(torch.tensor([0]), torch.zeros(1), SIZE))
    one.accumulate({"p0": ramp(float("nan"))})
    assert torch.equal(one.without_gradient(), ramp())


# -- rider --------------------------------------------------------------------------------------------


def two_sums(rank: int) -> Program[tuple[Tensor, Tensor]]:
    first = yield AllReduce(torch.full((2, 3), float(rank)))
    second = yield AllReduce(torch.full((4,), 10.0 * rank))
    return first.clone(), second.clone()


def no_sum(rank: int) -> Program[Tensor]:
    return (yield AllGather(torch.tensor([rank]))).flatten()


def whole_number_sum(rank: int) -> Program[Tensor]:
    """An all-reduce that floats cannot ride in."""
    return (yield AllReduce(torch.tensor([rank, rank]))).clone()


def gather_then_sum(rank: int) -> Program[tuple[Tensor, Tensor]]:
    gathered = yield AllGather(torch.tensor([rank]))
    return gathered.flatten(), (yield AllReduce(torch.ones(1))).clone()


def empty_sum(rank: int) -> Program[Tensor]:
    return (yield AllReduce(torch.empty(0))).clone()


def silence(rank: int) -> Program[Tensor]:
    yield from ()
    return torch.tensor([rank])


COLLECTIVES: dict[Callable[[int], Program[object]], int] = {
    two_sums: 2,
    no_sum: 2,
    whole_number_sum: 2,
    gather_then_sum: 2,
    empty_sum: 1,
    silence: 1,
}
"""How many each program needs, the rider's included."""


def framed(program: Program[Any], message: Tensor, rank: int, world: int) -> Program[tuple[Any, Tensor]]:
    message = torch.cat([message, torch.zeros(CHECKSUM_WORDS)])
    frame = Frame(program, message, Checksum(rank, world), Meter(rank, world), Timeline())
    return (yield from frame.run())


@pytest.mark.parametrize("program", COLLECTIVES, ids=lambda program: program.__name__)
@pytest.mark.parametrize("world", [1, 3])
def test_a_rider_is_summed_and_the_program_notices_nothing(
    program: Callable[[int], Program[object]], world: int
) -> None:
    alone = lockstep.run([program(rank) for rank in range(world)])
    meters = [Meter(rank, world) for rank in range(world)]
    riders = [torch.tensor([1.0, float(rank)]) for rank in range(world)]
    together = lockstep.run(
        [framed(program(rank), riders[rank], rank, world) for rank in range(world)], meters
    )
    for rank in range(world):
        result, ride = together[rank]
        torch.testing.assert_close(result, alone[rank], rtol=0, atol=0)
        assert torch.equal(ride[:-CHECKSUM_WORDS], torch.tensor([float(world), float(sum(range(world)))]))
        assert meters[rank].collectives == COLLECTIVES[program]


def test_an_error_in_the_program_is_not_swallowed() -> None:
    def breaks() -> Program[None]:
        yield AllReduce(torch.ones(1))
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        lockstep.run([framed(breaks(), torch.zeros(1), 0, 1)])


# -- finiteness ---------------------------------------------------------------------------------------

HUGE = {torch.float32: 3e38, torch.float64: 1.7e308, torch.float16: 65504.0, torch.bfloat16: 3e38}


@pytest.mark.parametrize("dtype", HUGE)
def test_a_sum_that_overflows_is_still_finite(dtype: torch.dtype) -> None:
    x = torch.full((4096,), HUGE[dtype], dtype=dtype)
    assert not x.float().sum().isfinite() or not x.sum().isfinite(), "the sum must overflow for this to show"
    assert is_finite(x)
    assert is_finite(-x)


@pytest.mark.parametrize("dtype", HUGE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@given(size=st.integers(1, 3000), data=st.data())
def test_one_bad_value_is_seen_wherever_it_is(
    dtype: torch.dtype, bad: float, size: int, data: st.DataObject
) -> None:
    x = torch.ones(size, dtype=dtype)
    assert is_finite(x)
    x[data.draw(st.integers(0, size - 1))] = bad
    assert not is_finite(x)


def test_infinities_that_cancel_and_bad_values_in_an_overflowing_sum_are_seen() -> None:
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))
    assert not is_finite(torch.tensor([3e38] * 9 + [float("nan")]))


def test_nothing_is_finite() -> None:
    assert is_finite(torch.empty(0))
