"""Nothing depends on torch's default type and device, which belong to whoever imports this library.

The default device is set to "meta", where nothing has data: what is made there by mistake cannot be read.
A wider type shows in what is made by it; a narrower one also in a number that was rounded, or
beyond its range, on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsieve import kernels
from gradsieve.checkpoint.fields import text_to_tensor
from gradsieve.kernels import torch_passes
from gradsieve.ranks_alike import digest
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.exdyna import ExDyna
from gradsieve.testing.laws import same_bits
from gradsieve.testing.ranks import VirtualRanks
from gradsieve.types import fields_to_tensors
from gradsieve.wire.indices import INDEX_CODECS
from gradsieve.wire.values import VALUE_CODECS
from gradsieve_tools.bench import traffic
from gradsieve_tools.bench.common import models, workloads
from gradsieve_tools.bench.tasks import data as task_data
from laws.cases import Case, published, registered, schemes
from laws.treated import GRADIENTS, STEPS, Ranks, Receiving, Stepping
from laws.treated import Case as Training
from laws.variants import VARIANTS
from unit.kernels import reference

DEFAULTS: dict[str, tuple[torch.dtype, str | None]] = {
    "float64 on meta": (torch.float64, "meta"),
    "float16": (torch.float16, None),
    "bfloat16": (torch.bfloat16, None),
}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    set_defaults(torch.float32, None)


def set_defaults(dtype: torch.dtype, device: str | None) -> None:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)


def check_indifferent(work: Callable[[], Any], defaults: Iterable[str] = DEFAULTS) -> None:
    """The same bits, in the same types, whatever the default."""
    expected = work()
    for default in defaults:
        set_defaults(*DEFAULTS[default])
        assert same_bits(work(), expected), default


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("work", [lambda: [torch.ones(3)], lambda: [torch.arange(3) / 2]])
def test_what_follows_a_default_is_seen(default: str, work: Callable[[], list[Tensor]]) -> None:
    with pytest.raises((AssertionError, NotImplementedError)):
        check_indifferent(work, [default])


ONE_KIND = [lambda: [torch.ones(3, device="cpu")], lambda: [torch.ones(3, dtype=torch.int64)]]


@pytest.mark.parametrize("work", ONE_KIND)
def test_a_default_of_one_kind_is_seen_too(work: Callable[[], list[Tensor]]) -> None:
    with pytest.raises((AssertionError, NotImplementedError)):
        check_indifferent(work, ["float64 on meta"])


# -- kernels --------------------------------------------------------------------------------------------

N = torch_passes._CHUNK + 1077


@cache
def vectors() -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(N, generator=source) for _ in range(3)]


def every_result(form: Any) -> list[Any]:
    """Of all kernels that have several forms; most of the elements, then a few of them, are above."""
    a, b, c = (x.clone() for x in vectors())
    out, waits = torch.zeros_like(a), torch.zeros_like(a)
    found: list[Any] = [form.accumulate(a, b, 0.9, out), out]
    form.waiting(a, b, waits)
    for threshold in (0.1, 3.5):
        found += [form.above(a, threshold), *form.waiting_above(a, b, threshold)]
        found += form.select(a, threshold, 900, 0.5)
        found += form.select(a, threshold, N, 0.0)
    form.rebase(a, b, c, 0.5)
    return [*found, waits, b, c]


def on_an_accelerator(x: Tensor) -> list[Tensor]:
    return [*torch_passes.select_without_waiting(x, 1.0, 900, 0.5)]


def every_other_result(form: Any) -> list[Any]:
    """Of the kernels that have one form beside the reference."""
    x = vectors()[0][:3000]
    block = torch.arange(3000, dtype=torch.long, device="cpu") // 1000
    counts = torch.tensor([3, 0, 1000], dtype=torch.long, device="cpu")
    nothing = form.candidates(x[:0], 0, 3)
    many, few = block * 7, block[:100] * 7
    return [
        form.largest(x, 40),
        form.candidates(x, 700, 3),
        form.largest_of_each(x.abs(), block, counts),
        *form.sum_by_index(many, x, 4000),
        *form.sum_by_index(few, x[:100], 4000),
        form.is_finite(x),
        nothing,
    ]


@pytest.mark.parametrize("form", ["torch", "compiled"])
def test_kernels(form: str) -> None:
    with kernels.using(form):
        check_indifferent(lambda: every_result(kernels))


@pytest.mark.parametrize("form", [kernels, reference], ids=["torch", "reference"])
def test_kernels_of_one_form(form: Any) -> None:
    with kernels.using("torch"):
        check_indifferent(lambda: [*every_other_result(form), *every_result(form)])


def test_the_way_of_accelerators() -> None:
    check_indifferent(lambda: on_an_accelerator(vectors()[0]))


# -- wire -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", INDEX_CODECS, ids=lambda codec: codec.name)
def test_index_codecs(codec: Any) -> None:
    indices, count = torch.tensor([3, 17, 900, 0]), torch.tensor(3)
    check_indifferent(lambda: codec.encode(indices, count, 4, 1000))


@pytest.mark.parametrize("codec", VALUE_CODECS.values(), ids=lambda codec: codec.name)
def test_value_codecs(codec: Any) -> None:
    values = vectors()[0][None, :300]

    def there_and_back() -> list[Tensor]:
        data = codec.encode(values)
        return [data, codec.decode(data, 300, torch.float32)]

    check_indifferent(there_and_back)


# -- schemes and pipelines ------------------------------------------------------------------------------


def exchanged(scheme: Callable[[], Scheme[Any]], case: Case) -> Callable[[], list[Any]]:
    """A few steps of all ranks: what each was given, spent, and is left with."""
    source = case.source
    gradients = {
        (step, rank, bucket): source(step, rank, bucket)
        for step in range(case.steps)
        for rank in range(case.world)
        for bucket in range(len(case.sizes))
    }

    def run() -> list[Any]:
        fleet = VirtualRanks(scheme(), case.sizes, case.world)
        rounds = list(fleet.advance(lambda *place: gradients[place], case.steps))
        return [[round_.outcomes for round_ in rounds], fleet.residuals, fleet.states]

    return run


CASES = [
    Case("normal", world=4, sizes=(4099, 509), density=0.05),
    Case("sparse integers", world=6, sizes=(31, 0), density=0.29),
]

REPEATABLE = [name for name in VARIANTS if name != "spardl, auto"]
"""But for the one whose teams follow from how fast links are measured to be."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
@pytest.mark.parametrize("scheme", schemes(registered()))
def test_exchanges(scheme: str, case: Case) -> None:
    check_indifferent(exchanged(lambda: case.scheme(scheme), case))


@pytest.mark.parametrize("scheme", published())
def test_exchanges_by_published_rules(scheme: str) -> None:
    case = Case("normal", world=3, sizes=(999,), density=0.05, steps=4)
    check_indifferent(exchanged(lambda: case.scheme(scheme), case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
@pytest.mark.parametrize("variant", REPEATABLE)
def test_exchanges_of_variants(variant: str, case: Case) -> None:
    check_indifferent(exchanged(lambda: VARIANTS[variant](case.density, case.world), case))


TRAINING = Training(world=4, n=1001, cap_mb=0.001)


def listed(by_rank: list[dict[str, Tensor]]) -> list[list[Tensor]]:
    return [[*own.values()] for own in by_rank]


def remembered(ranks: Ranks) -> list[Any]:
    return [listed(ranks.memories()), [pipeline.states for pipeline in ranks.pipelines]]


def stepped(scheme: str, treatment: str) -> list[Any]:
    ranks = Stepping(TRAINING, scheme, *STEPS[treatment])
    for step in range(TRAINING.steps):
        ranks.advance(step)
    coherences = [pipeline.coherence for pipeline in ranks.pipelines]
    return [listed(ranks.flat), coherences, *remembered(ranks)]


def received(scheme: str, treatment: str) -> list[Any]:
    ranks = Receiving(TRAINING, scheme, GRADIENTS[treatment])
    given = [ranks.advance(step) for step in range(TRAINING.steps)]
    return [*map(listed, given), *remembered(ranks)]


@pytest.mark.parametrize("treatment", STEPS)
@pytest.mark.parametrize("scheme", ["exdyna", "oktopk"])
def test_exchange_of_steps(scheme: str, treatment: str) -> None:
    check_indifferent(lambda: stepped(scheme, treatment))


@pytest.mark.parametrize("treatment", GRADIENTS)
def test_exchange_of_gradients(treatment: str) -> None:
    check_indifferent(lambda: received("exdyna", treatment))


# -- what is compared, kept and measured ----------------------------------------------------------------


def test_digests_and_numbers_in_checkpoints() -> None:
    def work() -> list[Tensor]:
        state = ExDyna(density=0.1).begin(100, 4)
        return [digest(vectors()), *fields_to_tensors(state, "").values(), text_to_tensor("exdyna")]

    check_indifferent(work)


def made_for_benches() -> list[Any]:
    torch.manual_seed(0)
    gradients = traffic.Gradients(5000, scale=0.1)
    rated = task_data.ratings.__wrapped__(2000, 100)
    words = models.interactions([b"one two two three", b"two four"], items=3)
    return [gradients.envelope, gradients.pool, rated, words, *workloads.batch_for("mlp", 5000)]


def test_what_benches_measure_with() -> None:
    check_indifferent(made_for_benches)
