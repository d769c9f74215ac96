"""Which form of a kernel runs: torch's anywhere, numba's on the CPU, Triton's on CUDA.

A compiled form is taken where its library can be imported and the tensors suit it, and torch's otherwise.
Nothing is imported before the first call: numba alone takes longer than a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.kernels import fast, low_bit
from gradsieve.kernels.blocks import Blocks


class Kernels(Protocol):
    """What every form offers; `reference.py` says what each of them means."""

    def above(self, x: Tensor, threshold: float) -> Tensor: ...

    def accumulate(self, residual: Tensor, gradient: Tensor, scale: float, out: Tensor) -> bool: ...

    def rebase(self, shared: Tensor, own: Tensor, anchor: Tensor, preview: float) -> None: ...

    def is_finite(self, x: Tensor) -> bool: ...

    def select(
        self, x: Tensor, threshold: float, capacity: int, phase: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def apply(
        self,
        shared: Tensor,
        own: Tensor,
        anchor: Tensor,
        update: Tensor,
        spent: Tensor,
        world: int,
        preview: float | None,
    ) -> None: ...

    def waiting(self, anchor: Tensor, own: Tensor, out: Tensor) -> None: ...

    def waiting_above(self, anchor: Tensor, own: Tensor, threshold: float) -> tuple[Tensor, Tensor]: ...


class LowBitKernels(Protocol):
    """Values in few bits; `low_bit.py` says what they mean. Apart, as few runs need their machine code."""

    def encode_low(self, bits: int, values: Tensor, blocks: Blocks | None = None) -> Tensor: ...

    def decode_low(
        self, bits: int, data: Tensor, count: int, dtype: torch.dtype, blocks: Blocks | None = None
    ) -> Tensor: ...

    def decode_low_into(self, bits: int, data: Tensor, out: Tensor, blocks: Blocks | None = None) -> None: ...

    def decode_low_sum(
        self, bits: int, data: Tensor, count: int, dtype: torch.dtype, blocks: Blocks | None = None
    ) -> Tensor: ...


TORCH = cast(Kernels, fast)
TORCH_LOW_BIT = cast(LowBitKernels, low_bit)
Form = TypeVar("Form")
_WIDE = (torch.float32,)
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_form = "compiled"
_loading = threading.Lock()


@contextmanager
def using(form: str) -> Iterator[None]:
    """Within it, in all threads, "torch": torch's form alone; "compiled": the compiled one, or an error."""
    global _form
    if form not in ("torch", "compiled"):
        raise ConfigError(f'kernels are "torch" or "compiled", not {form!r}')
    if form == "compiled" and on_cpu() is TORCH:
        raise ConfigError(f"no compiled kernels: {_loaded(_numba, TORCH)[1]}; pip install 'gradsieve[cpu]'")
    before, _form = _form, form
    try:
        yield
    finally:
        _form = before


def active() -> str:
    """The form that float32 on the CPU takes: "compiled", "torch", or "torch (why it is not compiled)"."""
    if _form == "torch":
        return "torch"
    reason = _loaded(_numba, TORCH)[1]
    return f"torch ({reason})" if reason else "compiled"


def form_for(*tensors: Tensor, narrow: Tensor | None = None) -> Kernels:
    """The form for these tensors. Compiled ones take float32 vectors as long as the first, end to end; on
    CUDA the one given as `narrow`, a gradient or parameters, may be bfloat16 or float16."""
    if _form == "torch":
        return TORCH
    every, n = tensors if narrow is None else (*tensors, narrow), tensors[0].numel()
    for x in every:
        accepted = _NARROW if x is narrow and x.is_cuda else _WIDE
        if x.dtype not in accepted or x.dim() != 1 or x.numel() != n or not x.is_contiguous():
            return TORCH
    if all(x.is_cpu for x in every):
        return on_cpu()
    return on_cuda() if all(x.is_cuda for x in every) else TORCH


def low_bit_form_for(x: Tensor, dtype: torch.dtype) -> LowBitKernels:
    """The form for values of this type that are, or become, x. Compiled ones take float32, end to end."""
    if _form == "torch" or dtype != torch.float32 or not x.is_contiguous():
        return TORCH_LOW_BIT
    if x.is_cpu:
        return _loaded(_numba_low_bit, TORCH_LOW_BIT)[0]
    return _loaded(_triton_low_bit, TORCH_LOW_BIT)[0] if x.is_cuda else TORCH_LOW_BIT


def on_cpu() -> Kernels:
    return _loaded(_numba, TORCH)[0]


def on_cuda() -> Kernels:
    return _loaded(_triton, TORCH)[0]


def _loaded(load: Callable[[], Form], otherwise: Form) -> tuple[Form, str]:
    with _loading:  # two threads need not compile the same
        form, reason = _load_once(load)
    return otherwise if form is None else form, reason


@cache
def _load_once(load: Callable[[], Form]) -> tuple[Form | None, str]:
    """The form, or none and why: whatever is wrong with an extra, training goes on without it."""
    try:
        return load(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _numba() -> Kernels:
    from gradsieve.kernels.compiled import Compiled

    return _kept_on_disk(Compiled)


def _numba_low_bit() -> LowBitKernels:
    from gradsieve.kernels.compiled_low_bit import CompiledLowBit

    return _kept_on_disk(CompiledLowBit)


def _kept_on_disk(form: Callable[[bool], Form]) -> Form:
    """Where that is possible: numba raises what it finds, no place to write or a broken file."""
    try:
        return form(True)
    except Exception:
        return form(False)


def _triton() -> Kernels:
    from gradsieve.kernels import triton_kernels

    triton_kernels.try_out(torch.device("cuda"))
    return cast(Kernels, triton_kernels)


def _triton_low_bit() -> LowBitKernels:
    from gradsieve.kernels import triton_low_bit

    triton_low_bit.try_out(torch.device("cuda"))
    return cast(LowBitKernels, triton_low_bit)
