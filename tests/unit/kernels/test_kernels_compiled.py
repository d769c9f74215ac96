"""The kernels that have several forms: torch's and the compiled one do what the reference does.

Bit for bit, but for two things that the definition leaves open: which NaN a NaN is, and the order in which
`select` adds up its tail.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gradsieve import kernels
from gradsieve.errors import ConfigError
from gradsieve.kernels import numba_forms, torch_passes
from gradsieve.testing.laws import same_bits
from unit.kernels import reference

CHUNK = torch_passes._CHUNK
FORMS = ["torch", "compiled"]
ODD = [0.0, -0.0, 1.0, -1.0, 1.5, 0.1, torch.nan, torch.inf, -torch.inf, 1e-42, -1e-42, 3e38, -3e38]
"""Ties, both zeros, both infinities, denormals, and what overflows where it is added to itself."""
THRESHOLDS = [0.0, 1e-42, 0.1, 1.0, 1.25, 3e38, float("inf"), float("nan"), 1e300]
SCALES = [1.0, 0.9, 0.0, -2.0]
LENGTHS = st.integers(0, 70) | st.integers(1000, 2200) | st.just(CHUNK + 77)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.using(request.param):
        yield request.param


@st.composite
def several(draw: st.DrawFn, count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Vectors of one length, each beginning anywhere in a cache line, full of ties or without any."""
    n = draw(LENGTHS)
    source = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    table = torch.tensor(draw(st.sampled_from([ODD, [x for x in ODD if abs(x) < 2]])), dtype=dtype)
    vectors = []
    for _ in range(count):
        start = draw(st.integers(0, 17))
        values = table[torch.randint(0, len(table), (n + start,), generator=source)]
        if draw(st.booleans()):
            values = torch.randn(n + start, generator=source, dtype=dtype)
        vectors.append(values[start:])
    return vectors


def alike(left: Tensor, right: Tensor) -> bool:
    """The same bits, but for which NaN it is."""
    return same_bits(left.isnan(), right.isnan()) and same_bits(
        torch.where(left.isnan(), 0.0, left), torch.where(right.isnan(), 0.0, right)
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_place", [False, True])
@given(vectors=several(3), scale=st.sampled_from(SCALES))
def test_accumulate_adds_as_the_reference(
    form: str, in_place: bool, vectors: list[Tensor], scale: float
) -> None:
    residual, gradient, out = vectors
    wanted = torch.empty_like(out)
    finite = reference.accumulate(residual, gradient, scale, wanted)
    out = residual.clone() if in_place else out
    with kernels.using(form):
        assert kernels.accumulate(out if in_place else residual, gradient, scale, out) == finite
    assert alike(out, wanted)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_accumulate_sees_a_single_bad_value_anywhere_and_the_residual_leaves_it_out(bad: float) -> None:
    n = CHUNK + 300
    zeros, out = torch.zeros(n), torch.empty(n + 1)[1:]
    assert kernels.accumulate(zeros, zeros, 1.0, out)
    for place in (0, 14, 15, 16, 1023, 1038, 1039, CHUNK - 1, CHUNK, n - 2, n - 1):
        spoiled = torch.zeros(n)
        spoiled[place] = bad
        assert not kernels.accumulate(zeros, spoiled, 1.0, out)
        assert alike(out, spoiled)
        kernels.residual(zeros, spoiled, out)
        assert not out.any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_place", [False, True])
@given(vectors=several(3))
def test_waiting_is_the_references(form: str, in_place: bool, vectors: list[Tensor]) -> None:
    mark, own, out = vectors
    wanted = torch.empty_like(out)
    reference.residual(mark, own, wanted)
    out = own.clone() if in_place else out
    with kernels.using(form):
        kernels.residual(mark, out if in_place else own, out)
    assert alike(out, wanted)


@pytest.mark.parametrize("form", FORMS)
@given(vectors=several(1))
def test_finite_is_what_the_reference_calls_finite(form: str, vectors: list[Tensor]) -> None:
    with kernels.using(form):
        assert kernels.is_finite(*vectors) == reference.is_finite(*vectors)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_single_value_that_is_not_finite_is_seen_in_any_page_and_any_layout(bad: float) -> None:
    n = 3 * 8192 + 300
    x = torch.full((n + 1,), 3e38)[1:]
    assert kernels.is_finite(x, -x, torch.ones(2, 3).t(), torch.ones((), dtype=torch.float64))
    for place in (0, 1, 1023, 1024, 8191, 8192, n - 301, n - 300, n - 1):
        x[place] = bad
        assert not kernels.is_finite(torch.ones(3), x)
        assert not kernels.is_finite(x.view(4, -1))
        assert not kernels.is_finite(x.view(4, -1).t())
        x[place] = 3e38


@pytest.mark.parametrize("form", FORMS)
@given(vectors=several(2), threshold=st.sampled_from(THRESHOLDS))
def test_waiting_above_finds_what_the_reference_finds(
    form: str, vectors: list[Tensor], threshold: float
) -> None:
    before = [x.clone() for x in vectors]
    with kernels.using(form):
        found = kernels.residual_above(*vectors, threshold)
    assert same_bits(found, reference.residual_above(*vectors, threshold))
    assert same_bits(vectors, before)


@pytest.mark.parametrize("form", FORMS)
@given(vectors=several(3), preview=st.sampled_from([0.0, 0.3, 1.0]))
def test_rebase_leaves_what_the_reference_leaves(form: str, vectors: list[Tensor], preview: float) -> None:
    shared, own, mark = (x.clone() for x in vectors)
    reference.rebase(*vectors, preview)
    with kernels.using(form):
        kernels.rebase(shared, own, mark, preview)
    assert all(map(alike, (shared, own, mark), vectors))


@pytest.mark.parametrize("form", FORMS)
@given(vectors=several(5), world=st.integers(1, 9))
def test_apply_leaves_what_the_reference_leaves(form: str, vectors: list[Tensor], world: int) -> None:
    ours = [x.clone() for x in vectors]
    reference.apply(*vectors, world)
    with kernels.using(form):
        kernels.apply(*ours, world)
    assert all(map(alike, ours, vectors))


NARROW = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", [*NARROW, torch.float64])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_every_kernel_takes_other_dtypes(dtype: torch.dtype, wide: torch.dtype) -> None:
    source = torch.Generator().manual_seed(1)
    shared, mark = torch.randn(2, CHUNK + 9, generator=source, dtype=wide)
    narrow = torch.randn(CHUNK + 9, generator=source).to(min(dtype, wide, key=lambda each: each.itemsize))
    ours, theirs = torch.empty_like(shared), torch.empty_like(shared)
    for scale in SCALES:
        kernels.accumulate(shared, narrow, scale, ours)
        reference.accumulate(shared, narrow, scale, theirs)
        assert same_bits(ours, theirs)
    kernels.residual(mark, narrow, ours)
    reference.residual(mark, narrow, theirs)
    assert same_bits(ours, theirs)
    mine = kernels.residual_above(mark, narrow, 2.5)
    assert same_bits(mine, reference.residual_above(mark, narrow, 2.5))
    own, left = narrow.clone(), mark.clone()
    kernels.rebase(shared, own, left, 0.3)
    reference.rebase(shared, narrow, mark, 0.3)
    assert same_bits((own, left), (narrow, mark))


@pytest.mark.usefixtures("form")
def test_parameters_that_require_gradients_are_taken() -> None:
    shared, mark, out = torch.zeros(3), torch.zeros(3), torch.empty(3)
    own = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    kernels.residual(mark, own, out)
    assert out.tolist() == [-1.0, 2.0, -3.0]
    assert kernels.residual_above(mark, own, 2.0)[0].tolist() == [1, 2]
    kernels.rebase(shared, own, mark, 0.5)
    assert own.tolist() == [0.5, -1.0, 1.5]


@pytest.mark.parametrize("form", FORMS)
@given(
    vectors=several(1),
    threshold=st.sampled_from(THRESHOLDS),
    capacity=st.integers(0, 80) | st.just(CHUNK),
    phase=st.sampled_from([0.0, 0.3, 0.5, 0.999999]),
)
def test_select_takes_what_the_reference_takes(
    form: str, vectors: list[Tensor], threshold: float, capacity: int, phase: float
) -> None:
    with kernels.using(form):
        indices, demand, tail = kernels.select(*vectors, threshold, capacity, phase)
    wanted, all_of_them, tail_sum = reference.select(*vectors, threshold, capacity, phase)
    assert same_bits((indices, demand), (wanted, all_of_them))
    assert (tail.dtype, tail.shape) == (torch.float32, ())
    assert torch.allclose(tail, tail_sum, rtol=1e-4)
    assert 0.0 <= float(tail) <= torch.finfo(torch.float32).max


@given(
    vectors=several(1),
    threshold=st.sampled_from(THRESHOLDS),
    capacity=st.integers(0, 80),
    phase=st.sampled_from([0.0, 0.5, 0.999999]),
)
def test_the_way_of_accelerators_takes_the_same(
    vectors: list[Tensor], threshold: float, capacity: int, phase: float
) -> None:
    indices, demand, tail = torch_passes.select_without_waiting(*vectors, threshold, capacity, phase)
    wanted, all_of_them, tail_sum = reference.select(*vectors, threshold, capacity, phase)
    assert same_bits((indices, demand), (wanted, all_of_them))
    assert torch.allclose(tail, tail_sum, rtol=1e-4)


@given(vectors=several(1), threshold=st.sampled_from(THRESHOLDS))
def test_above_compiled_is_above(vectors: list[Tensor], threshold: float) -> None:
    with kernels.using("compiled"):
        assert same_bits(kernels.above(*vectors, threshold), reference.above(*vectors, threshold))


def test_float32_vectors_on_the_cpu_are_compiled_and_all_else_is_torchs() -> None:
    x = torch.zeros(8)
    assert kernels._passes(x, x) is numba_forms
    others = [x.double(), x.bfloat16(), x[::2], x[:4], x.view(2, 4), x.to("meta")]
    assert [kernels._passes(x, other) for other in others] == [torch_passes] * len(others)
    with kernels.using("torch"):
        assert kernels._passes(x, x) is torch_passes
        assert kernels.active() == "torch"
    assert kernels.active() == "compiled"


def test_on_cuda_gradients_and_parameters_may_be_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_load", lambda group, device: (device, ""))
    with FakeTensorMode():
        wide, on_cpu = torch.empty(8, device="cuda"), torch.empty(8)
        for dtype in NARROW:
            own, short = (torch.empty(n, dtype=dtype, device="cuda") for n in (8, 4))
            assert kernels._passes(wide, wide, narrow=own) == "cuda"
            assert kernels._passes(wide, narrow=short) is torch_passes
            assert kernels._passes(on_cpu, narrow=own) is torch_passes
            if dtype != torch.float32:
                assert kernels._passes(wide, own) is torch_passes
                assert kernels._passes(on_cpu, narrow=on_cpu.to(dtype)) is torch_passes
        double = torch.empty(8, dtype=torch.float64, device="cuda")
        assert kernels._passes(wide, narrow=double) is torch_passes


def test_whoever_owns_a_vector_may_resize_it_afterwards() -> None:
    vectors = [torch.zeros(8) for _ in range(4)]
    with kernels.using("compiled"):
        kernels.accumulate(vectors[0], vectors[1], 1.0, vectors[2])
        kernels.residual(*vectors[:3])
        kernels.rebase(*vectors[:3], 1.0)
        kernels.residual_above(*vectors[:2], 1.0)
        kernels.above(vectors[0], 1.0)
    for x in vectors:
        x.untyped_storage().resize_(0)
    borrowed = torch.zeros(8)
    borrowed.numpy()
    with pytest.raises(RuntimeError, match="not resizable"):
        borrowed.untyped_storage().resize_(0)


def test_vectors_of_different_lengths_are_refused_and_not_read_past_their_end() -> None:
    with pytest.raises(RuntimeError, match="size"):
        kernels.accumulate(torch.zeros(5), torch.zeros(3), 1.0, torch.zeros(5))


@pytest.fixture
def loads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_load", kernels._load.__wrapped__)


@pytest.mark.usefixtures("loads_again")
def test_without_numba_it_is_torchs_form_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kernels, "numba_forms")
    monkeypatch.setitem(sys.modules, "gradsieve.kernels.numba_forms", None)
    assert kernels._passes(torch.zeros(3)) is torch_passes
    assert kernels.active().startswith("torch (ModuleNotFoundError")
    assert kernels.above(torch.ones(3), 0.5).tolist() == [0, 1, 2]
    assert kernels.encode_low(1, torch.ones(3)).tolist() == [0x80, 0x3F, 0b111]
    with pytest.raises(ConfigError, match=r"gradsieve\[cpu\]"), kernels.using("compiled"):
        pass


def seen_while_running(work: Callable[[], object]) -> bool:
    """Whether this thread ever runs while another one is inside `work`. None is made to yield."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        return any(_seen_once(work) for _ in range(30))
    finally:
        sys.setswitchinterval(interval)


def _seen_once(work: Callable[[], object]) -> bool:
    inside, done = threading.Event(), []

    def run() -> None:
        inside.set()
        work()
        done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait()
    seen = not done
    thread.join()
    assert done, "the work itself failed"
    return seen


def test_every_compiled_kernel_lets_other_threads_run() -> None:
    a, b, c, d, e = (torch.zeros(1 << 20) for _ in range(5))
    assert seen_while_running(lambda: numba_forms.accumulate(a, b, 1.0, c))
    assert seen_while_running(lambda: numba_forms.residual(a, b, c))
    assert seen_while_running(lambda: numba_forms.apply(a, b, c, d, e, 4))
    assert seen_while_running(lambda: numba_forms.rebase(a, b, c, 1.0))
    assert seen_while_running(lambda: numba_forms.is_finite(a))
    assert seen_while_running(lambda: numba_forms.above(a, 1.0))
    assert seen_while_running(lambda: numba_forms.residual_above(a, b, 1.0))


def test_what_keeps_the_others_waiting_is_seen() -> None:
    assert not seen_while_running(lambda: sum(range(100_000)))
