"""Kernels: all that is done to every element of a model, what it means, and which form of it runs.

    torch    anywhere
    numba    contiguous float32 vectors on the CPU
    Triton   the same on CUDA, where a small trial on the device answers as torch does; parameters may be
             bfloat16 or float16

All forms give the same bits, except for the payload of a NaN. A compiled form runs if its library can be
imported, which is tried at the first call: numba alone takes longer than a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve.kernels import torch_passes
from gradsieve.kernels.blocks import BLOCK, Blocks, even
from gradsieve.kernels.torch_passes import candidates, largest, largest_of_each, sum_by_index, window

__all__ = [
    "above",
    "accumulate",
    "active",
    "apply",
    "candidates",
    "decode_low",
    "decode_low_into",
    "decode_low_sum",
    "encode_low",
    "finite",
    "is_finite",
    "largest",
    "largest_of_each",
    "library_of",
    "low_bit_blocks",
    "low_bit_size",
    "rebase",
    "residual",
    "residual_above",
    "select",
    "sum_by_index",
    "using",
]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_form = "compiled"
# The module with a group's form, by type of device; the first one takes all tensors.
_MODULES = {
    "passes": {"any": "torch_passes", "cpu": "numba_forms", "cuda": "triton_passes"},
    "low bit": {"any": "torch_low_bit", "cpu": "numba_forms", "cuda": "triton_low_bit"},
}


def above(x: Tensor, threshold: float) -> Tensor:
    """Returns sorted indices with |x| >= threshold. NaN is never above."""
    found: Tensor = _passes(x).above(x, threshold)
    return found


def accumulate(residual: Tensor, gradient: Tensor, scale: float, out: Tensor) -> bool:
    """Sets out = scale * residual + gradient and says whether all of it is finite. `out` may be the residual.
    The product is rounded before it is added, since not all machines have a fused multiply-add."""
    return bool(_passes(residual, out, narrow=gradient).accumulate(residual, gradient, scale, out))


def is_finite(*tensors: Tensor) -> bool:
    """Says whether no NaN or infinity is in any tensor. On an accelerator the host waits once, for all."""
    return bool(finite(*tensors))


def finite(*tensors: Tensor) -> Tensor:
    """Does the same on the tensors' device: the host does not wait for an accelerator."""
    vectors = [x.detach().view(-1) if x.is_contiguous() else x.detach() for x in tensors]
    here = all(_passes(x).is_finite(x) for x in vectors if x.is_cpu)
    elsewhere = [x for x in vectors if not x.is_cpu]
    if here and elsewhere:
        return torch_passes.finite(elsewhere)
    return torch.tensor(here, dtype=torch.bool, device="cpu")


def residual(anchor: Tensor, own: Tensor, out: Tensor) -> None:
    """Sets out = the residual, anchor - own; what is not finite counts as 0 (an optimizer overflowed there).
    `out` may be `own`."""
    _passes(anchor, out, narrow=own).residual(anchor, own, out)


def residual_above(anchor: Tensor, own: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Returns sorted indices where |residual| >= threshold, and the residual there, without a vector of n."""
    found: tuple[Tensor, Tensor] = _passes(anchor, narrow=own).residual_above(anchor, own, threshold)
    return found


def rebase(shared: Tensor, own: Tensor, anchor: Tensor, preview: float) -> None:
    """Sets own = shared - preview * residual in place, rounded to its dtype. The anchor follows, so that the
    residual stays the same, up to rounding."""
    _passes(shared, anchor, narrow=own).rebase(shared, own, anchor, preview)


def apply(shared: Tensor, own: Tensor, anchor: Tensor, update: Tensor, spent: Tensor, world: int) -> None:
    """Subtracts update / world from shared, and what was spent from the residual, in place. The anchor is
    exactly `own` where nothing is left, so that a model of which all was sent is the shared one to the last
    bit. `own` is only read."""
    _passes(shared, anchor, update, spent, narrow=own).apply(shared, own, anchor, update, spent, world)


def select(x: Tensor, threshold: float, capacity: int, phase: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `capacity` of the sorted indices with |x| >= threshold, how many there are (demand), and their
    tail.

    Where there are more than fit, the run of them from rank floor(phase * (demand - capacity)) on; where
    there are fewer, filled up with x.numel(). The tail is the sum of ln(|x| / threshold) over the demand, as
    a finite float32 from 0 up. On an accelerator the host waits for nothing.
    """
    if not x.is_cpu:
        return torch_passes.select_without_waiting(x, threshold, capacity, phase)
    found = above(x, threshold)
    return window(found, x[found], x.numel(), threshold, capacity, phase)


# -- values in few bits: `torch_low_bit.py` says what the bytes mean ----------------------------------------


def low_bit_size(bits: int, count: int, blocks: Blocks | None = None) -> int:
    """Returns how many bytes `encode_low` makes of `count` values."""
    return 2 * low_bit_blocks(count) + -(-count * bits // 8) if blocks is None else blocks.size(bits)


def low_bit_blocks(count: int) -> int:
    """Returns how many blocks `count` values have, each with two bytes of scale before all codes."""
    return -(-count // BLOCK)


def encode_low(bits: int, values: Tensor, blocks: Blocks | None = None) -> Tensor:
    """Writes float32 or float64 of shape (..., count) as bytes of shape (..., size): codes of 1, 2 or 4 bits,
    in these blocks or in blocks that are full up to the last one."""
    blocks = _blocks_of(values.shape[-1], blocks)
    data: Tensor = _low_bit(values, values.dtype).encode_low(bits, values, blocks)
    return data


def decode_low(
    bits: int, data: Tensor, count: int, dtype: torch.dtype, blocks: Blocks | None = None
) -> Tensor:
    """Reads bytes of shape (..., size) as values of shape (..., count); any bytes decode to some floats."""
    out = torch.empty((*data.shape[:-1], count), dtype=dtype, device=data.device)
    decode_low_into(bits, data, out, blocks)
    return out


def decode_low_into(bits: int, data: Tensor, out: Tensor, blocks: Blocks | None = None) -> None:
    """Decodes into memory that is there already: new memory costs more than the decoding."""
    _decode(bits, data, out, blocks, add=False)


def decode_low_sum(
    bits: int, data: Tensor, count: int, dtype: torch.dtype, blocks: Blocks | None = None
) -> Tensor:
    """Adds up the values of rows of bytes, of shape (rows, size), in the order of the rows."""
    if data.dim() != 2 or not len(data):
        raise ValueError(f"rows to add up, not a tensor of shape {tuple(data.shape)}")
    out = torch.empty(count, dtype=dtype, device=data.device)
    _decode(bits, data, out, blocks, add=True)
    return out


def _decode(bits: int, data: Tensor, out: Tensor, blocks: Blocks | None, add: bool) -> None:
    blocks = _blocks_of(out.shape[-1], blocks)
    wanted = blocks.size(bits)
    if data.dtype != torch.uint8 or data.shape[-1] != wanted:
        raise ValueError(f"{wanted} bytes are {blocks.count} values, not {data.shape[-1]} of {data.dtype}")
    _low_bit(out, out.dtype).decode_low(bits, data.contiguous(), out, blocks, add)


def _blocks_of(count: int, blocks: Blocks | None) -> Blocks:
    """Checks the count of the blocks: compiled forms read and write as much as the blocks say."""
    blocks = blocks or even(count)
    if blocks.count != count:
        raise ValueError(f"these blocks are of {blocks.count} values, not of {count}")
    return blocks


# -- which form runs -----------------------------------------------------------------------------------------


@contextmanager
def using(form: str) -> Iterator[None]:
    """Chooses a form for all threads: "torch", or "compiled", which raises if there is none."""
    global _form
    if form not in ("torch", "compiled"):
        raise ConfigError(f'kernels are "torch" or "compiled", not {form!r}')
    if form == "compiled" and (reason := _load("passes", "cpu")[1]):
        raise ConfigError(f"no compiled kernels: {reason}; pip install 'gradsieve[cpu]'")
    before, _form = _form, form
    try:
        yield
    finally:
        _form = before


def active() -> str:
    """Names the form that float32 on the CPU takes: "compiled", "torch", or "torch (why not compiled)"."""
    if _form == "torch":
        return "torch"
    reason = _load("passes", "cpu")[1]
    return f"torch ({reason})" if reason else "compiled"


def library_of(kernel: str, x: Tensor) -> str:
    """Names the library whose form of this kernel runs for vectors like x: "torch", "numba" or "triton"."""
    form = _low_bit(x, x.dtype) if "low" in kernel else _passes(x)
    module: str = getattr(form, kernel).__module__
    return module.rpartition(".")[2].partition("_")[0]


def _passes(*tensors: Tensor, narrow: Tensor | None = None) -> Any:
    """Returns the form of passes for these tensors. Compiled ones take float32 vectors as long as the first,
    end to end; on CUDA the one given as `narrow`, a gradient or parameters, may be bfloat16 or float16."""
    first, n = tensors[0], tensors[0].numel()
    if _form == "torch" or not (first.is_cpu or first.is_cuda):
        return torch_passes
    for x in tensors if narrow is None else (*tensors, narrow):
        fits = x.dtype in _NARROW if x is narrow and x.is_cuda else x.dtype == torch.float32
        if not fits or x.dim() != 1 or x.numel() != n or not x.is_contiguous() or x.is_cpu != first.is_cpu:
            return torch_passes
    return _load("passes", first.device.type)[0]


def _low_bit(x: Tensor, dtype: torch.dtype) -> Any:
    """Returns the form of codes for values of this type that are, or become, x."""
    if _form == "torch" or dtype != torch.float32 or not x.is_contiguous() or not (x.is_cpu or x.is_cuda):
        return _load("low bit", "any")[0]
    return _load("low bit", x.device.type)[0]


@cache
def _load(group: str, device: str) -> tuple[Any, str]:
    """Returns the form; or torch's, and why: whatever is wrong with an extra, training goes on without it."""
    try:
        form = import_module(f"{__name__}.{_MODULES[group][device]}")
        if device == "cuda":
            form.try_out(torch.device(device))
        return form, ""
    except Exception as error:
        return _load(group, "any")[0], f"{type(error).__name__}: {error}"
