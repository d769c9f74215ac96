"""Torch's forms choose and sum exactly what the reference does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import kernels
from gradsieve.kernels import torch_passes
from gradsieve.testing.laws import same_bits
from unit.kernels import reference

CHUNK = torch_passes._CHUNK
"""Where the fast selection starts to work in pieces, and how long they are."""
DTYPES = [torch.float32, torch.float64]
ODD = [0.0, -0.0, 1.0, -1.0, 1.5, torch.nan, torch.inf, -torch.inf, 1e-42, -1e-42, 1e38]
"""Ties, both zeros, both infinities, denormals."""
THRESHOLDS = [0.0, 1e-42, 1.0, 1.25, 1e38, float("inf"), float("nan")]


@st.composite
def vectors(draw: st.DrawFn, finite: bool = False) -> Tensor:
    """Values full of ties, as a contiguous vector, every second element of one, or a slice with an offset."""
    n = draw(
        st.integers(0, 70)
        | st.integers(CHUNK - 9, CHUNK + 9)
        | st.integers(2 * CHUNK - 9, 2 * CHUNK + 9)
        | st.just(3 * CHUNK + 5)
    )
    table = torch.tensor(
        [x for x in ODD if x * 0 == 0] if finite else ODD, dtype=draw(st.sampled_from(DTYPES))
    )
    source = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    rarity = draw(st.sampled_from([0.0, 0.5, 0.999]))  # how often a zero stands in
    places = torch.randint(0, len(table), (2 * n + 3,), generator=source)
    values = table[places * (torch.rand(2 * n + 3, generator=source) >= rarity)]
    layout = draw(st.sampled_from([slice(0, n), slice(0, 2 * n, 2), slice(3, n + 3)]))
    return values[layout]


@given(x=vectors(), threshold=st.sampled_from(THRESHOLDS))
def test_above_selects_what_the_reference_selects(x: Tensor, threshold: float) -> None:
    before = x.clone()
    assert same_bits(torch_passes.above(x, threshold), reference.above(x, threshold))
    assert same_bits(x.contiguous(), before.contiguous())


@given(x=vectors(), k=st.integers(0, 100) | st.just(CHUNK))
def test_largest_takes_what_the_reference_takes(x: Tensor, k: int) -> None:
    assert same_bits(torch_passes.largest(x, k), reference.largest(x, k))


SHAPES = {
    "normal": lambda x: x,
    "skewed": lambda x: x * torch.exp(-12 * torch.linspace(0, 1, len(x))),
    "heavy": lambda x: x**7,
    "rare": lambda x: x * (torch.arange(len(x)) % 997 == 0),
    "all in the first elements": lambda x: x * (torch.arange(len(x)) < 5000),
    "in step with the sample": lambda x: x * (1 + 99 * (torch.arange(len(x)) % 41 == 0)),
    "constant": lambda x: x * 0 + 3,
    "zeros": lambda x: x * 0,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [1, 49, 51, 2000, 30_000, 200_000])
def test_largest_is_exact_whatever_the_sample_says(shape: str, k: int) -> None:
    x = SHAPES[shape](torch.randn(3 * CHUNK + 5, generator=torch.Generator().manual_seed(k)))
    assert same_bits(torch_passes.largest(x, k), reference.largest(x, k))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("length", "count"),
    [(512, 1), (257, 3), (1000, 10), (1000, 999), (50_000, 5000), (CHUNK, 300), (10**7, 900)],
)
def test_candidates_hold_the_largest_of_every_block_and_not_much_else(
    shape: str, length: int, count: int
) -> None:
    x = SHAPES[shape](torch.randn(2 * CHUNK + 77, generator=torch.Generator().manual_seed(length)))
    found, least = torch_passes.candidates(x, length, count), reference.candidates(x, length, count)
    assert bool((found[1:] > found[:-1]).all())
    assert bool(torch.isin(least, found).all())
    if shape == "normal":
        assert found.numel() <= 2.5 * least.numel()


@given(
    sizes=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    counts=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    values=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=48, max_size=48),
)
def test_largest_of_each_block_are_those_of_the_reference(
    sizes: list[int], counts: list[int], values: list[float]
) -> None:
    block = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    magnitude = torch.tensor(values[: block.numel()])
    wanted = torch.tensor(counts[: len(sizes)])
    mine = torch_passes.largest_of_each(magnitude, block, wanted)
    assert same_bits(mine, reference.largest_of_each(magnitude, block, wanted))


@given(x=vectors(finite=True), k=st.integers(1, 100))
def test_largest_leaves_nothing_larger_behind_and_takes_no_zero(x: Tensor, k: int) -> None:
    taken = torch_passes.largest(x, k)
    left = torch.ones(x.numel(), dtype=torch.bool)
    left[taken] = False
    smallest = x[taken].abs().min() if taken.numel() else torch.inf
    assert taken.numel() == min(k, int(x.count_nonzero()))
    assert bool((x[taken] != 0).all())
    assert not bool((x[left].abs() > smallest).any())


@given(
    n=st.sampled_from([1, 5, 40, 1000]),
    places=st.lists(st.floats(0, 0.9999), max_size=60),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_sum_by_index_adds_in_the_order_of_the_reference(
    n: int, places: list[float], dtype: torch.dtype, data: st.DataObject
) -> None:
    indices = torch.tensor([int(place * n) for place in places], dtype=torch.int64)
    numbers = st.floats(-(2.0**99), 2.0**99, width=32) | st.sampled_from([0.1, -0.1, 1e8, -0.0])
    values = data.draw(st.lists(numbers, min_size=len(places), max_size=len(places)))
    ours = torch_passes.sum_by_index(indices, torch.tensor(values, dtype=dtype), n)
    theirs = reference.sum_by_index(indices, torch.tensor(values, dtype=dtype), n)
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("n", [10, 100_000])
def test_sum_by_index_depends_on_the_order_given_and_on_nothing_else(n: int) -> None:
    """1e8 + 1 - 1e8 in float32 tells orders apart: by the way of sorting and by that of adding densely."""
    indices = torch.tensor([3, 3, 3])
    _, rounded = torch_passes.sum_by_index(indices, torch.tensor([1e8, 1.0, -1e8]), n)
    _, exact = torch_passes.sum_by_index(indices, torch.tensor([1e8, -1e8, 1.0]), n)
    assert (rounded.item(), exact.item()) == (0.0, 1.0)


@pytest.mark.parametrize("n", [0, 5, 1000])
def test_sum_of_nothing_is_nothing(n: int) -> None:
    present, total = torch_passes.sum_by_index(torch.zeros(0, dtype=torch.int64), torch.zeros(0), n)
    assert present.numel() == total.numel() == 0


@given(x=vectors())
def test_finite_is_what_the_reference_calls_finite(x: Tensor) -> None:
    assert torch_passes.is_finite(x) == reference.is_finite(x)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_value_anywhere_is_seen_and_a_sum_that_overflows_is_not_one(bad: float) -> None:
    large = torch.full((1000,), 3e38)
    assert torch_passes.is_finite(large)
    assert torch_passes.is_finite(torch.zeros(0))
    large[617] = bad
    assert not torch_passes.is_finite(large)
    assert not torch_passes.is_finite(torch.tensor([torch.inf, -torch.inf]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_same_of_many_as_for_an_accelerator(bad: float) -> None:
    many = [torch.ones(3), torch.full((9,), 3e38), torch.zeros(0), torch.ones(2, dtype=torch.float64)]
    assert torch_passes.finite(many)
    assert torch_passes.finite([])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert not torch_passes.finite([*many, torch.tensor([1.0, bad, 2.0], dtype=dtype)])


def test_the_reference_knows_every_kernel_the_package_offers() -> None:
    low_bit = {name for name in kernels.__all__ if "low" in name}  # `torch_low_bit.py` is their reference
    for name in set(kernels.__all__) - {"active", "finite", "library_of", "using"} - low_bit:
        assert callable(getattr(reference, name))
