"""Kernels on the device against their meaning on the CPU, and their share of its memory's bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradsieve import kernels
from gradsieve.testing.laws import same_bits

if TYPE_CHECKING:
    from gradsieve_tools.doctor.self_test.trainings import Here

# Ties, both zeros, both infinities, denormals, and what overflows where it is added to itself
_ODD = (0.0, -0.0, 1.0, -1.0, 1.5, 0.1, torch.nan, torch.inf, -torch.inf, 1e-42, -1e-42, 3e38, -3e38)
# Thresholds: one with ties, and one above which a Gaussian has one element in a thousand
_TIES, _RARE = 1.0, 3.29
# types of vectors, and of a rank's own parameters
_WIDTHS = ((torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.bfloat16))
_ROWS, _PREVIEW, _WORLD = 2, 0.5, 4
# Seconds that a copy should take, so that caches and launches do not count; elements for that at most
_LONG_ENOUGH, _MOST = 1e-3, 1 << 26
_TIMES, _SECONDS = 5, 0.3  # repetitions of a kernel, and most seconds for them


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    moves: float  # bytes read and written for each float32
    # function of `gradsieve.kernels`, vectors and a threshold
    call: Callable[[Any, list[Tensor], float], tuple[Any, ...]]
    vectors: int = 1
    own: int | None = None  # index of the vector with the parameters' type
    bits: int = 0  # bits of a code; 0: none
    codes: bool = False  # the input is codes
    sums: int = 0  # last results that are sums, in any order

    def inputs(self, vectors: list[Tensor]) -> list[Tensor]:
        if not self.codes:
            return vectors[: self.vectors]
        rows = [kernels.encode_low(self.bits, each) for each in vectors[:_ROWS]]
        return [torch.stack(rows), vectors[0]]


def _low(bits: int) -> Iterator[Kernel]:
    code = bits / 8
    yield Kernel(f"encode_low({bits})", 4 + code, lambda k, x, _: (k.encode_low(bits, x[0]),), bits=bits)
    yield Kernel(
        f"decode_low({bits})",
        _ROWS * (code + 4),
        lambda k, x, _: (k.decode_low(bits, x[0], len(x[1]), x[1].dtype),),
        codes=True,
        bits=bits,
    )
    yield Kernel(
        f"decode_low_sum({bits})",
        _ROWS * code + 4,
        lambda k, x, _: (k.decode_low_sum(bits, x[0], len(x[1]), x[1].dtype),),
        codes=True,
        bits=bits,
    )


KERNELS = (
    Kernel("is_finite", 4, lambda k, x, _: (k.is_finite(x[0]),)),
    Kernel("above", 4, lambda k, x, t: (k.above(x[0], t),)),
    Kernel("select", 4, lambda k, x, t: k.select(x[0], t, len(x[0]) // 250 + 1, 0.3), sums=1),
    Kernel("accumulate", 12, lambda k, x, _: (k.accumulate(x[0], x[1], 0.9, x[0]), x[0]), 2),
    Kernel("residual", 12, lambda k, x, _: (k.residual(x[0], x[1], x[2]), x[2]), 3, own=1),
    Kernel("residual_above", 8, lambda k, x, t: k.residual_above(x[0], x[1], t), 2, own=1),
    Kernel("rebase", 20, lambda k, x, _: (k.rebase(x[0], x[1], x[2], _PREVIEW), *x), 3, own=1),
    Kernel("apply", 28, lambda k, x, _: (k.apply(*x, _WORLD), *x), 5, own=1),
    *_low(1),
    *_low(2),
    *_low(4),
)


def describe(here: Here) -> dict[str, Any]:
    name = getattr(torch.get_device_module(here.device.type), "get_device_name", None)
    return {
        "type": here.device.type,
        "name": str(name()) if name is not None and here.device.type != "cpu" else "",
        "devices": 0 if here.device.type == "cpu" else torch.accelerator.device_count(),
        "cuda": torch.version.cuda or torch.version.hip or "",
        "kernels": sorted({_form(kernel, here) for kernel in KERNELS}),
    }


def _form(kernel: Kernel, here: Here) -> str:
    """Return which library's runs for float32."""
    called = {"select": "above"}.get(kernel.name, kernel.name.partition("(")[0].removesuffix("_sum"))
    library = kernels.library_of(called, torch.zeros(1, dtype=torch.float32, device=here.device))
    return library.replace("triton", "Triton")


def compare(here: Here, lengths: list[int]) -> dict[str, Any]:
    """Return how many comparisons were made, and those that did not agree to the bit."""
    count, wrong = 0, []
    for kernel in KERNELS:
        for wide, own in _WIDTHS:
            if own != wide and kernel.own is None:
                continue
            for name, vectors in _cases(lengths, wide):
                inputs = kernel.inputs(vectors)
                if kernel.own is not None:
                    inputs[kernel.own] = inputs[kernel.own].to(own)
                count += 1
                if not _agree(kernel, inputs, here.device):
                    wrong.append(f"{kernel.name} of {name} {str(own).removeprefix('torch.')}")
    return {"comparisons": count, "wrong": wrong}


def _cases(lengths: list[int], dtype: torch.dtype) -> Iterator[tuple[str, list[Tensor]]]:
    chance = torch.Generator(device="cpu").manual_seed(1)
    odd = torch.tensor(_ODD, dtype=dtype, device="cpu")
    for n in lengths:
        start = n % 2  # so that some begin where no vector register does
        shape = (5, n + start)
        usual = torch.randn(shape, generator=chance, dtype=dtype, device="cpu")
        places = torch.randint(len(odd), shape, generator=chance, dtype=torch.int64, device="cpu")
        yield f"{n} usual", [x[start:] for x in usual]
        yield f"{n} odd", [x[start:] for x in odd[places]]


def _agree(kernel: Kernel, inputs: list[Tensor], device: torch.device) -> bool:
    with kernels.using("torch"):
        wanted = kernel.call(kernels, [x.clone() for x in inputs], _TIES)
    ours = kernel.call(kernels, [_beginning_there(x, device) for x in inputs], _TIES)
    exact = len(wanted) - kernel.sums
    return all(map(_alike, ours[:exact], wanted[:exact])) and all(
        torch.allclose(one.cpu(), other, rtol=1e-4)
        for one, other in zip(ours[exact:], wanted[exact:], strict=True)
    )


def _beginning_there(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, as far from the beginning of its memory."""
    start = x.storage_offset() % 2
    room = torch.empty(start + x.numel(), dtype=x.dtype, device=device)
    return room[start:].view(x.shape).copy_(x)


def _alike(one: Any, other: Any) -> bool:
    """Return the same bits, but for which NaN it is."""
    if not isinstance(one, Tensor):
        return bool(one == other)
    one = one.cpu()
    if one.is_floating_point() and one.dtype == other.dtype and one.shape == other.shape:
        nan = one.isnan()
        return same_bits(nan, other.isnan()) and same_bits(
            one.masked_fill(nan, 0.0), other.masked_fill(nan, 0.0)
        )
    return same_bits(one, other)


def measure(here: Here, elements: int) -> dict[str, Any]:
    """Bytes a second of a copy and of each kernel, the quickest of a few."""
    chance = torch.Generator(device="cpu").manual_seed(2)
    while True:
        values = torch.randn(elements, generator=chance, dtype=torch.float32, device="cpu")
        x = values.to(here.device)
        target = torch.empty_like(x)
        seconds = _quickest(partial(target.copy_, x), here)
        if seconds >= _LONG_ENOUGH or elements >= _MOST:
            break
        elements *= 4
    found = {}
    for kernel in KERNELS:
        inputs = [each.to(here.device) for each in kernel.inputs([values.clone() for _ in range(5)])]
        taken = _quickest(partial(kernel.call, kernels, inputs, _RARE), here)
        found[kernel.name] = kernel.moves * elements / taken
    forms = {kernel.name: _form(kernel, here) for kernel in KERNELS}
    return {"elements": elements, "copy": 8 * elements / seconds, "kernels": found, "forms": forms}


def _quickest(call: Callable[[], Any], here: Here) -> float:
    call()  # compiled by now
    here.settle()
    taken: list[float] = []
    while len(taken) < _TIMES and sum(taken) < _SECONDS:
        begin = time.perf_counter()
        call()
        here.settle()
        taken.append(time.perf_counter() - begin)
    return min(taken)
