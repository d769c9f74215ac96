"""The Triton kernels, under Triton's interpreter on the CPU, do what the reference does.

What compilers for GPUs make of them is in `test_triton_compiles.py`. What they cost on one was never measured
here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

INTERPRET = "TRITON_INTERPRET"
before = os.environ.get(INTERPRET)
os.environ[INTERPRET] = "1"  # read where a kernel is defined, Triton's own included
pytest.importorskip("triton", reason="Triton is not installed: pip install --no-deps triton")
from gradsieve.kernels import fast, low_bit, reference, triton_kernels, triton_low_bit  # noqa: E402
from gradsieve.kernels.blocks import Blocks, block_layout  # noqa: E402
from gradsieve.testing.laws import same_bits  # noqa: E402
from unit.kernels.test_blocks import patterned  # noqa: E402

if before is None:
    del os.environ[INTERPRET]

BLOCK = triton_kernels.BLOCK
ODD = [0.0, -0.0, 1.0, -1.0, 1.5, torch.nan, torch.inf, -torch.inf, 1e-42, 3e38, -3e38]
THRESHOLDS = [0.0, 1e-42, 1.0, 1.25, 3e38, float("inf"), float("nan")]
LENGTHS = st.integers(0, 40) | st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, for NaN and infinities
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """Triton asks for it again when a kernel is started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INTERPRET, "1")
        yield


@st.composite
def several(draw: st.DrawFn, count: int) -> list[Tensor]:
    n = draw(LENGTHS)
    source = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    table = torch.tensor(draw(st.sampled_from([ODD, [0.0, 1.0, -1.0, 1.5]])))
    return [table[torch.randint(0, len(table), (n,), generator=source)] for _ in range(count)]


def alike(left: Tensor, right: Tensor) -> bool:
    """The same bits, but for which NaN it is."""
    return same_bits(left.isnan(), right.isnan()) and same_bits(left.nan_to_num(0.0), right.nan_to_num(0.0))


NARROW = [torch.float32, torch.bfloat16, torch.float16]
EXACT = [1, 15, 16, 17, BLOCK, BLOCK + 16, 2 * BLOCK - 1]
"""Lengths that Triton could specialise on: one, and what sixteen divides; and others."""


def models(n: int, count: int, narrow: torch.dtype) -> list[Tensor]:
    """Vectors with a few odd values among random ones; the second in its own type."""
    source = torch.Generator().manual_seed(n)
    vectors = list(torch.randn(count, n, generator=source))
    for x in vectors:
        odd = torch.tensor([*ODD, 7e4, -7e4, 1e-6, 3e-8, 3.4e38, -2e-39, 1e-40])  # the ends of narrow types
        odd = odd[torch.randint(0, len(odd), (n,), generator=source)]
        x.copy_(torch.where(torch.rand(n, generator=source) < 0.3, odd, x))
    vectors[1] = vectors[1].to(narrow)
    return vectors


@pytest.mark.parametrize("narrow", NARROW)
@given(vectors=several(5), preview=st.sampled_from([None, 0.0, 0.3, 1.0]), world=st.integers(1, 9))
def test_apply_leaves_what_the_reference_leaves(
    narrow: torch.dtype, vectors: list[Tensor], preview: float | None, world: int
) -> None:
    vectors[1] = vectors[1].to(narrow)
    ours = [x.clone() for x in vectors]
    reference.apply(*vectors, world, preview)
    triton_kernels.apply(*ours, world, preview)
    assert all(map(alike, ours, vectors))


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("n", EXACT)
def test_models_of_all_lengths_and_types_move_as_the_references(n: int, narrow: torch.dtype) -> None:
    given_ = models(n, 5, narrow)
    for world, preview in ((1, None), (3, 0.3), (7, 1)):
        ours, theirs = ([x.clone() for x in given_] for _ in range(2))
        for form, vectors in ((triton_kernels, ours), (reference, theirs)):
            form.apply(*vectors, world, preview)
        assert all(map(alike, ours, theirs))
        for form, (shared, own, anchor, _, out) in ((triton_kernels, ours), (reference, theirs)):
            form.rebase(shared, own, anchor, 1 / 3)
            form.waiting(anchor, own, out)
        assert all(map(alike, ours, theirs))


@pytest.mark.parametrize("narrow", NARROW)
def test_parameters_are_rounded_and_read_as_torch_does(narrow: torch.dtype) -> None:
    """Every upper half of a float32, with lower ones that are less than a tie, a tie, and more."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)[:, None] << 16
    lower = torch.tensor([0, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    shared = (upper | lower).flatten()[:: 1 if narrow == torch.bfloat16 else 3].clone().view(torch.float32)
    own, anchor = torch.zeros_like(shared, dtype=narrow), torch.zeros_like(shared)
    triton_kernels.rebase(shared, own, anchor, 0.0)
    assert alike(own, shared.to(narrow))
    assert alike(anchor, own.float() + 0.0)  # what waits is added: nothing, which has a sign


@pytest.mark.parametrize("narrow", NARROW)
@given(vectors=several(3), preview=st.sampled_from([0.0, 0.3, 1.0]))
def test_rebase_leaves_what_the_reference_leaves(
    narrow: torch.dtype, vectors: list[Tensor], preview: float
) -> None:
    vectors[1] = vectors[1].to(narrow)
    ours = [x.clone() for x in vectors]
    reference.rebase(*vectors, preview)
    triton_kernels.rebase(*ours, preview)
    assert all(map(alike, ours, vectors))


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("in_place", [False, True])
@given(vectors=several(3), threshold=st.sampled_from(THRESHOLDS))
def test_what_waits_is_the_references(
    in_place: bool, narrow: torch.dtype, vectors: list[Tensor], threshold: float
) -> None:
    anchor, own, out = vectors
    own = own.to(narrow)
    found = triton_kernels.waiting_above(anchor, own, threshold)
    assert same_bits(found, reference.waiting_above(anchor, own, threshold))
    out = own if in_place else out
    wanted = out.clone()
    reference.waiting(anchor, own.clone(), wanted)
    triton_kernels.waiting(anchor, own, out)
    assert alike(out, wanted)


@pytest.mark.parametrize("narrow", NARROW)
def test_parameters_that_require_gradients_are_moved(narrow: torch.dtype) -> None:
    own = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=narrow))
    triton_kernels.apply(torch.zeros(3), own, torch.zeros(3), torch.zeros(3), torch.zeros(3), 2, 0.5)
    assert own.tolist() == [0.5, -1.0, 1.5]


@pytest.mark.parametrize("n", EXACT)
@pytest.mark.parametrize("capacity", [1, 16])
def test_select_and_accumulate_of_lengths_to_specialise_on(n: int, capacity: int) -> None:
    residual, gradient, out, wanted = models(n, 4, torch.bfloat16)
    finite = reference.accumulate(residual, gradient, 0.9, wanted)
    assert triton_kernels.accumulate(residual, gradient, 0.9, out) == finite
    assert alike(out, wanted)
    ours, theirs = (form.select(out, 1.0, capacity, 0.5) for form in (triton_kernels, reference))
    assert same_bits(ours[:2], theirs[:2])


@given(
    vectors=several(1),
    threshold=st.sampled_from(THRESHOLDS),
    capacity=st.sampled_from([0, 1, 2, 7, BLOCK, 4 * BLOCK]),
    phase=st.sampled_from([0.0, 0.5, 0.999999]),
)
def test_select_takes_what_the_reference_takes(
    vectors: list[Tensor], threshold: float, capacity: int, phase: float
) -> None:
    indices, demand, tail = triton_kernels.select(*vectors, threshold, capacity, phase)
    wanted, all_of_them, tail_sum = reference.select(*vectors, threshold, capacity, phase)
    assert same_bits((indices, demand), (wanted, all_of_them))
    assert (tail.dtype, tail.shape) == (torch.float32, ())
    assert torch.allclose(tail, tail_sum, rtol=1e-4)


@pytest.mark.parametrize("narrow", NARROW)
@given(vectors=several(3), scale=st.sampled_from([1.0, 0.9, 0.0]))
def test_accumulate_adds_as_the_reference(narrow: torch.dtype, vectors: list[Tensor], scale: float) -> None:
    residual, gradient, out = vectors
    wanted = torch.empty_like(out)
    finite = reference.accumulate(residual, gradient.to(narrow), scale, wanted)
    assert triton_kernels.accumulate(residual, gradient.to(narrow), scale, out) == finite
    assert alike(out, wanted)


@given(vectors=several(3), threshold=st.sampled_from(THRESHOLDS), capacity=st.sampled_from([0, 1, 5, 9000]))
def test_accumulate_mark_scan_and_compact_are_accumulate_and_select(
    vectors: list[Tensor], threshold: float, capacity: int
) -> None:
    residual, gradient, out = vectors
    marks = triton_kernels.accumulate_and_mark(residual, gradient, 1.0, out, threshold)
    starts = triton_kernels.scan(marks.counts)
    begin = fast.window_start(starts[-1], capacity, 0.5)
    indices = triton_kernels.compact(out, threshold, starts, begin, capacity)
    wanted = torch.empty_like(out)
    finite = reference.accumulate(residual, gradient, 1.0, wanted)
    assert alike(out, wanted)
    assert bool(marks.spoiled.sum() == 0) == finite
    assert same_bits((indices, starts[-1]), reference.select(wanted, threshold, capacity, 0.5)[:2])


@pytest.mark.parametrize("blocks", [1, 16, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 3 * BLOCK + 3])
def test_scan_counts_what_is_before_each_block(blocks: int) -> None:
    counts = torch.randint(0, BLOCK, (blocks,), dtype=torch.int32)
    starts = triton_kernels.scan(counts)
    assert starts.tolist() == [0, *counts.cumsum(0).tolist()]


def test_the_trial_passes_here_and_sees_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_kernels.try_out(torch.device("cpu"))
    monkeypatch.setattr(triton_kernels, "compact", lambda x, *_: torch.zeros(900, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="do not answer as torch's"):
        triton_kernels.try_out(torch.device("cpu"))


@pytest.mark.parametrize("kernel", ["apply", "rebase", "waiting"])
def test_the_trial_sees_a_model_that_is_moved_otherwise(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, kernel, lambda *_: None)
    with pytest.raises(RuntimeError, match="do not answer as torch's"):
        triton_kernels.try_out(torch.device("cpu"))


@st.composite
def rows_of_values(draw: st.DrawFn) -> Tensor:
    """Up to three rows, in which blocks of all magnitudes follow each other, one of them odd."""
    count = draw(st.integers(0, 40) | st.sampled_from([255, 256, 257, 700]))
    source = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    rows = torch.randn(draw(st.integers(1, 3)), count, generator=source)
    rows *= torch.tensor(draw(st.sampled_from([1.0, 1e-41, 1e-44, 1e37, 3e38, 0.0])))
    odd = torch.tensor(ODD)[torch.randint(0, len(ODD), rows.shape, generator=source)]
    return torch.where(
        torch.rand(rows.shape, generator=source) < draw(st.sampled_from([0, 0.01, 1])), odd, rows
    )


@pytest.mark.parametrize("bits", [1, 2, 4])
@given(values=rows_of_values())
def test_low_bits_are_torchs(bits: int, values: Tensor) -> None:
    data, count = low_bit.encode_low(bits, values), values.shape[1]
    assert same_bits(triton_low_bit.encode_low(bits, values), data)
    check_decoding(bits, data, count)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_low_bits_of_many_lengths_are_torchs_whatever_is_zero(bits: int) -> None:
    sizes = (*range(1, 34), 63, 64, 65, 127, 128, 129, 254, 255, 256)
    values, blocks = patterned(sum(sizes), bits), block_layout(sizes).between(0, sum(sizes))
    data = low_bit.encode_low(bits, values, blocks)
    assert same_bits(triton_low_bit.encode_low(bits, values, blocks), data)
    noise = torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for each in (data, noise):
        check_decoding(bits, each, sum(sizes), blocks)
    part = blocks.split(512)[2]  # whose first edge is not 0
    some = values[:, part.start : part.stop].contiguous()
    assert same_bits(triton_low_bit.encode_low(bits, some, part), low_bit.encode_low(bits, some, part))


@pytest.mark.parametrize("bits", [1, 2, 4])
@given(world=st.integers(1, 4), count=st.sampled_from([0, 1, 7, 9, 256, 300]), seed=st.integers(0, 1000))
def test_low_bits_of_any_bytes_are_torchs(bits: int, world: int, count: int, seed: int) -> None:
    shape, source = (world, low_bit.size_of(bits, count)), torch.Generator().manual_seed(seed)
    check_decoding(bits, torch.randint(0, 256, shape, dtype=torch.uint8, generator=source), count)


def check_decoding(bits: int, data: Tensor, count: int, blocks: Blocks | None = None) -> None:
    ours = triton_low_bit.decode_low(bits, data, count, torch.float32, blocks)
    assert alike(ours, low_bit.decode_low(bits, data, count, torch.float32, blocks))
    total = triton_low_bit.decode_low_sum(bits, data, count, torch.float32, blocks)
    assert alike(total, low_bit.decode_low_sum(bits, data, count, torch.float32, blocks))


@pytest.mark.parametrize("kernel", ["encode_low", "decode_low", "decode_low_sum"])
def test_the_trial_of_low_bits_sees_a_wrong_answer(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_low_bit.try_out(torch.device("cpu"))
    right = getattr(triton_low_bit, kernel)
    monkeypatch.setattr(triton_low_bit, kernel, lambda *arguments: right(*arguments).flip(-1))
    with pytest.raises(RuntimeError, match="do not answer as torch's"):
        triton_low_bit.try_out(torch.device("cpu"))
