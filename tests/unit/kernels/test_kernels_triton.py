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
from gradsieve.kernels import low_bit_size, torch_low_bit, triton_low_bit, triton_passes  # noqa: E402
from gradsieve.kernels.blocks import Blocks, block_layout, even  # noqa: E402
from gradsieve.testing.laws import same_bits  # noqa: E402
from unit.kernels import reference  # noqa: E402
from unit.kernels.test_blocks import patterned  # noqa: E402

if before is None:
    del os.environ[INTERPRET]

BLOCK = triton_passes.BLOCK
ODD = [0.0, -0.0, 1.0, -1.0, 1.5, torch.nan, torch.inf, -torch.inf, 1e-42, 3e38, -3e38]
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
@pytest.mark.parametrize("n", EXACT)
def test_models_of_all_lengths_and_types_move_as_the_references(n: int, narrow: torch.dtype) -> None:
    given_ = models(n, 5, narrow)
    for world in (1, 3, 7):
        ours, theirs = ([x.clone() for x in given_] for _ in range(2))
        for form, vectors in ((triton_passes, ours), (reference, theirs)):
            form.apply(*vectors, world)
        assert all(map(alike, ours, theirs))
        for form, (shared, own, anchor, _, out) in ((triton_passes, ours), (reference, theirs)):
            form.rebase(shared, own, anchor, 1 / 3)
            form.residual(anchor, own, out)
        assert all(map(alike, ours, theirs))


@pytest.mark.parametrize("narrow", NARROW)
def test_parameters_are_rounded_and_read_as_torch_does(narrow: torch.dtype) -> None:
    """Every upper half of a float32, with lower ones that are less than a tie, a tie, and more."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)[:, None] << 16
    lower = torch.tensor([0, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    shared = (upper | lower).flatten()[:: 1 if narrow == torch.bfloat16 else 3].clone().view(torch.float32)
    own, anchor = torch.zeros_like(shared, dtype=narrow), torch.zeros_like(shared)
    triton_passes.rebase(shared, own, anchor, 0.0)
    assert alike(own, shared.to(narrow))
    assert alike(anchor, own.float() + 0.0)  # what waits is added: nothing, which has a sign


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("in_place", [False, True])
@given(vectors=several(3))
def test_the_residual_is_the_references(in_place: bool, narrow: torch.dtype, vectors: list[Tensor]) -> None:
    anchor, own, out = vectors
    own = own.to(narrow)
    out = own if in_place else out
    wanted = out.clone()
    reference.residual(anchor, own.clone(), wanted)
    triton_passes.residual(anchor, own, out)
    assert alike(out, wanted)


@pytest.mark.parametrize("kernel", ["apply", "rebase", "residual"])
def test_the_trial_sees_a_model_that_is_moved_otherwise(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_passes.try_out(torch.device("cpu"))
    monkeypatch.setattr(triton_passes, kernel, lambda *_: None)
    with pytest.raises(RuntimeError, match="do not answer as torch's"):
        triton_passes.try_out(torch.device("cpu"))


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


def check_forms(bits: int, values: Tensor, blocks: Blocks) -> None:
    data = torch_low_bit.encode_low(bits, values, blocks)
    assert same_bits(triton_low_bit.encode_low(bits, values, blocks), data)
    check_decoding(bits, data, blocks)


def check_decoding(bits: int, data: Tensor, blocks: Blocks) -> None:
    for add, shape in ((False, (len(data), blocks.count)), (True, (blocks.count,))):
        ours, theirs = torch.empty(shape), torch.empty(shape)
        triton_low_bit.decode_low(bits, data, ours, blocks, add)
        torch_low_bit.decode_low(bits, data, theirs, blocks, add)
        assert alike(ours, theirs)


@pytest.mark.parametrize("bits", [1, 2, 4])
@given(values=rows_of_values())
def test_low_bits_are_torchs(bits: int, values: Tensor) -> None:
    check_forms(bits, values, even(values.shape[1]))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_low_bits_of_many_lengths_are_torchs_whatever_is_zero(bits: int) -> None:
    sizes = (*range(1, 34), 63, 64, 65, 127, 128, 129, 254, 255, 256)
    values, blocks = patterned(sum(sizes), bits), block_layout(sizes).between(0, sum(sizes))
    check_forms(bits, values, blocks)
    part = blocks.split(512)[2]  # whose first edge is not 0
    check_forms(bits, values[:, part.start : part.stop].contiguous(), part)


@pytest.mark.parametrize("bits", [1, 2, 4])
@given(world=st.integers(1, 4), count=st.sampled_from([0, 1, 7, 9, 256, 300]), seed=st.integers(0, 1000))
def test_low_bits_of_any_bytes_are_torchs(bits: int, world: int, count: int, seed: int) -> None:
    shape, source = (world, low_bit_size(bits, count)), torch.Generator().manual_seed(seed)
    check_decoding(bits, torch.randint(0, 256, shape, dtype=torch.uint8, generator=source), even(count))


@pytest.mark.parametrize("kernel", ["encode_low", "decode_low"])
def test_the_trial_of_low_bits_sees_a_wrong_answer(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_low_bit.try_out(torch.device("cpu"))
    right = getattr(triton_low_bit, kernel)

    def wrong(bits: int, values: Tensor, *others: object) -> object:
        return right(bits, values.flip(-1), *others)

    monkeypatch.setattr(triton_low_bit, kernel, wrong)
    with pytest.raises(RuntimeError, match="do not answer as torch's"):
        triton_low_bit.try_out(torch.device("cpu"))
