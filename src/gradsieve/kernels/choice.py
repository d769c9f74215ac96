"""Which form of a kernel runs: torch's anywhere, numba's on the CPU, Triton's on CUDA.

A compiled form is taken where its library can be imported and the tensors suit it, and torch's otherwise.
Nothing is imported before the first call: numba alone takes longer than a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.kernels import fast


class Kernels(Protocol):
    """What every form offers; `reference.py` says what each of them means."""

    def above(self, x: Tensor, threshold: float) -> Tensor: ...

    def accumulate(self, residual: Tensor, gradient: Tensor, scale: float, out: Tensor) -> bool: ...

    def fold(self, shared: Tensor, own: Tensor, mark: Tensor, preview: float) -> None: ...

    def select(
        self, x: Tensor, threshold: float, capacity: int, phase: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def waiting(self, mark: Tensor, own: Tensor, out: Tensor) -> None: ...

    def waiting_above(self, mark: Tensor, own: Tensor, threshold: float) -> tuple[Tensor, Tensor]: ...


TORCH = cast(Kernels, fast)
_form = "compiled"
_loading = threading.Lock()


@contextmanager
def using(form: str) -> Iterator[None]:
    """Within it, in all threads, "torch": torch's form alone; "compiled": the compiled one, or an error."""
    global _form
    if form not in ("torch", "compiled"):
        raise ConfigError(f'kernels are "torch" or "compiled", not {form!r}')
    if form == "compiled" and on_cpu() is TORCH:
        raise ConfigError(f"no compiled kernels: {_loaded(_numba)[1]}; pip install 'gradsieve[cpu]'")
    before, _form = _form, form
    try:
        yield
    finally:
        _form = before


def active() -> str:
    """The form that float32 on the CPU takes: "compiled", "torch", or "torch (why it is not compiled)"."""
    if _form == "torch":
        return "torch"
    reason = _loaded(_numba)[1]
    return f"torch ({reason})" if reason else "compiled"


def form_for(*tensors: Tensor) -> Kernels:
    """The form for these tensors. Compiled ones take float32 vectors as long as the first, end to end."""
    if _form == "torch":
        return TORCH
    n = tensors[0].numel()
    for x in tensors:
        if x.dtype != torch.float32 or x.dim() != 1 or x.numel() != n or not x.is_contiguous():
            return TORCH
    if all(x.is_cpu for x in tensors):
        return on_cpu()
    return on_cuda() if all(x.is_cuda for x in tensors) else TORCH


def on_cpu() -> Kernels:
    return _loaded(_numba)[0]


def on_cuda() -> Kernels:
    return _loaded(_triton)[0]


def _loaded(load: Callable[[], Kernels]) -> tuple[Kernels, str]:
    with _loading:  # two threads need not compile the same
        return _load_once(load)


@cache
def _load_once(load: Callable[[], Kernels]) -> tuple[Kernels, str]:
    """The form, or torch's and why: whatever is wrong with an extra, training goes on without it."""
    try:
        return load(), ""
    except Exception as error:
        return TORCH, f"{type(error).__name__}: {error}"


def _numba() -> Kernels:
    from gradsieve.kernels.compiled import Compiled

    try:
        return Compiled(cache=True)
    except Exception:  # numba raises what it meets: no place to write, a broken file
        return Compiled(cache=False)


def _triton() -> Kernels:
    from gradsieve.kernels import triton_kernels

    triton_kernels.try_out(torch.device("cuda"))
    return cast(Kernels, triton_kernels)
