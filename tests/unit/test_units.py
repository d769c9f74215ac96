"""Units: which parameters travel together, in which order, and which of them travel dense."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.units import Unit, flat_view, make_units, shaped_like

SHAPES = st.lists(st.integers(0, 60), min_size=0, max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@st.composite
def models(draw: st.DrawFn) -> list[tuple[str, Tensor]]:
    kinds = draw(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=12))
    return [(f"p{place}", torch.empty(shape, dtype=dtype)) for place, (shape, dtype) in enumerate(kinds)]


def names(units: list[Unit]) -> list[list[str]]:
    return [[slot.name for slot in unit.slots] for unit in units]


@given(model=models(), cap=st.integers(1, 40_000), small=st.sampled_from([0, 1, 100, 1024]))
def test_every_parameter_has_one_place_and_places_do_not_overlap(
    model: list[tuple[str, Tensor]], cap: int, small: int
) -> None:
    units = make_units(model, cap, small)
    shapes = dict(model)
    assert sorted(name for unit in names(units) for name in unit) == sorted(shapes)
    for unit in units:
        assert unit.dtype in (torch.float32, torch.float64)
        ends = [sum(slot.numel for slot in unit.slots[:place]) for place in range(len(unit.slots))]
        assert [slot.start for slot in unit.slots] == ends
        for slot in unit.slots:
            parameter = shapes[slot.name]
            assert slot.stop - slot.start == slot.numel == parameter.numel()
            assert unit.is_dense != (not small or (parameter.ndim > 1 and parameter.numel() >= small))
            assert (unit.dtype == torch.float64) == (parameter.dtype == torch.float64)


@given(model=models(), cap=st.integers(1, 40_000))
def test_units_are_filled_in_reverse_order_up_to_the_cap(model: list[tuple[str, Tensor]], cap: int) -> None:
    units = make_units(model, cap, small=1024)
    assert [unit.is_dense for unit in units] == sorted(unit.is_dense for unit in units)
    for dtype, is_dense in product((torch.float32, torch.float64), (False, True)):
        same = [unit for unit in units if (unit.dtype, unit.is_dense) == (dtype, is_dense)]
        expected = [
            name
            for name, p in reversed(model)
            if (p.dtype == torch.float64) == (dtype == torch.float64)
            and is_dense == (p.ndim < 2 or p.numel() < 1024)
        ]
        assert [name for unit in names(same) for name in unit] == expected
        for number, unit in enumerate(same):
            sizes = [slot.numel * dtype.itemsize for slot in unit.slots]
            assert sum(sizes[:-1]) < cap, "was full before its last member"
            assert sum(sizes) >= cap or number == len(same) - 1, "closed before it was full"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_what_is_not_a_real_number_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"'odd' is {dtype}"):
        make_units([("fine", torch.empty(3)), ("odd", torch.empty(3, dtype=dtype))], 1024, 1024)


@pytest.mark.parametrize(
    "odd",
    [
        torch.empty(1).expand(5),
        torch.empty(8, 6)[:, ::2],
        torch.empty(4, 1).expand(4, 4),
        torch.empty(9)[::3],
    ],
    ids=["expanded", "columns", "rows of one", "strided"],
)
def test_parameters_with_gaps_or_overlaps_are_refused_by_name(odd: Tensor) -> None:
    with pytest.raises(ConfigError, match="'odd' has gaps or overlaps"):
        make_units([("odd", odd)], 1024, 1024)


@pytest.mark.parametrize(
    "parameter",
    [
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(7),
        torch.randn(20)[5:11].view(2, 3),
        torch.randn(()),
        torch.randn(0, 3),
    ],
    ids=["plain", "transposed", "channels last", "vector", "offset", "scalar", "empty"],
)
def test_memory_order_and_back(parameter: Tensor) -> None:
    assert make_units([("p", parameter)], 1024, 1024)
    flat = flat_view(parameter)
    assert flat.shape == (parameter.numel(),)
    assert torch.equal(flat.sort().values, parameter.flatten().sort().values)
    assert torch.equal(shaped_like(flat.clone(), parameter), parameter)
    inside = torch.cat([torch.zeros(3), flat])[3:]  # a view with an offset, as in a residual
    assert torch.equal(shaped_like(inside, parameter), parameter)
    flat.zero_()
    assert not parameter.count_nonzero(), "flat_view is a view"
