"""Which elements: selection, summation and passes over whole models, on the tensors' own device.

`reference.py` says what each kernel means, `fast.py` computes the same with fewer passes over memory. Those
that pass over all n elements have compiled forms too, and `choice.py` takes the one that suits the tensors.
"""

import torch
from torch import Tensor

from gradsieve.kernels import fast, low_bit
from gradsieve.kernels.blocks import Blocks
from gradsieve.kernels.choice import TORCH_LOW_BIT, active, form_for, low_bit_form_for, using
from gradsieve.kernels.fast import candidates, largest, largest_of_each, sum_by_index

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
    "is_finite",
    "largest",
    "largest_of_each",
    "low_bit_blocks",
    "low_bit_size",
    "rebase",
    "select",
    "sum_by_index",
    "using",
    "waiting",
    "waiting_above",
]


def above(x: Tensor, threshold: float) -> Tensor:
    """Sorted indices with |x| >= threshold. NaN is never above."""
    return form_for(x).above(x, threshold)


def accumulate(residual: Tensor, gradient: Tensor, scale: float, out: Tensor) -> bool:
    """out = scale * residual + gradient; whether all of it is finite. `out` may be the residual."""
    return form_for(residual, out, narrow=gradient).accumulate(residual, gradient, scale, out)


def is_finite(*tensors: Tensor) -> bool:
    """No NaN and no infinity in any of them. On an accelerator the host waits once, for all of them."""
    return bool(finite(*tensors))


def finite(*tensors: Tensor) -> Tensor:
    """The same, where they are: the host does not wait for an accelerator."""
    vectors = [x.detach().view(-1) if x.is_contiguous() else x.detach() for x in tensors]
    here = all(form_for(x).is_finite(x) for x in vectors if x.is_cpu)
    elsewhere = [x for x in vectors if not x.is_cpu]
    if here and elsewhere:
        return fast.finite(elsewhere)
    return torch.tensor(here, dtype=torch.bool, device="cpu")


def waiting(anchor: Tensor, own: Tensor, out: Tensor) -> None:
    """out = anchor - own; what is not finite counts as 0 (an optimizer overflowed). `out` may be `own`."""
    form_for(anchor, out, narrow=own).waiting(anchor, own, out)


def waiting_above(anchor: Tensor, own: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Sorted indices where |waiting| >= threshold, and the residual there; no vector of n is written."""
    return form_for(anchor, narrow=own).waiting_above(anchor, own, threshold)


def rebase(shared: Tensor, own: Tensor, anchor: Tensor, preview: float) -> None:
    """In place: own = shared - preview * waiting, rounded to its dtype, and the anchor follows.

    `waiting`, the residual, is the same afterwards, up to rounding.
    """
    form_for(shared, anchor, narrow=own).rebase(shared, own, anchor, preview)


def apply(
    shared: Tensor,
    own: Tensor,
    anchor: Tensor,
    update: Tensor,
    spent: Tensor,
    world: int,
    preview: float | None,
) -> None:
    """In place: shared -= update / world; the residual gets smaller by what was spent, and is exactly 0
    where all of it was. With a preview, `rebase` as well, in the same pass; without, `own` is only read."""
    form = form_for(shared, anchor, update, spent, narrow=own)
    form.apply(shared, own, anchor, update, spent, world, preview)


def select(x: Tensor, threshold: float, capacity: int, phase: float) -> tuple[Tensor, Tensor, Tensor]:
    """`capacity` of the sorted indices with |x| >= threshold, how many there are (demand), and their tail.

    Where there are more than fit, the run of them from rank floor(phase * (demand - capacity)) on; where
    there are fewer, filled up with x.numel(). The tail is the sum of ln(|x| / threshold) over the demand, as
    a finite float32 from 0 up. On an accelerator the host waits for nothing.
    """
    return form_for(x).select(x, threshold, capacity, phase)


def low_bit_size(bits: int, count: int, blocks: Blocks | None = None) -> int:
    """Bytes that `encode_low` makes of `count` values."""
    return low_bit.size_of(bits, count) if blocks is None else blocks.size(bits)


def low_bit_blocks(count: int) -> int:
    """Blocks of `count` values, each with two bytes of scale before all codes."""
    return low_bit.blocks_of(count)


def encode_low(bits: int, values: Tensor, blocks: Blocks | None = None) -> Tensor:
    """Of float32 or float64 of shape (..., count) the bytes of shape (..., size): codes of 1, 2 or 4 bits, in
    these blocks or in such as are full up to the last one."""
    _check_blocks(values.shape[-1], blocks)
    return low_bit_form_for(values, values.dtype).encode_low(bits, values, blocks)


def decode_low(
    bits: int, data: Tensor, count: int, dtype: torch.dtype, blocks: Blocks | None = None
) -> Tensor:
    """Of bytes of shape (..., size) the values of shape (..., count); any bytes decode to some floats."""
    data = _whole(bits, data, count, blocks)
    return low_bit_form_for(data, dtype).decode_low(bits, data, count, dtype, blocks)


def decode_low_into(bits: int, data: Tensor, out: Tensor, blocks: Blocks | None = None) -> None:
    """As `decode_low`, into memory that is there already: new memory costs more than the decoding."""
    data = _whole(bits, data, out.shape[-1], blocks)
    form = low_bit_form_for(data, out.dtype) if out.is_contiguous() else TORCH_LOW_BIT
    form.decode_low_into(bits, data, out, blocks)


def decode_low_sum(
    bits: int, data: Tensor, count: int, dtype: torch.dtype, blocks: Blocks | None = None
) -> Tensor:
    """Of bytes of shape (rows, size) the sum of the rows' values, added up in the order of the rows."""
    if data.dim() != 2 or not len(data):
        raise ValueError(f"rows to add up, not a tensor of shape {tuple(data.shape)}")
    data = _whole(bits, data, count, blocks)
    return low_bit_form_for(data, dtype).decode_low_sum(bits, data, count, dtype, blocks)


def _whole(bits: int, data: Tensor, count: int, blocks: Blocks | None) -> Tensor:
    """Rows end to end, as compiled forms need them, and as long as these take them to be."""
    _check_blocks(count, blocks)
    wanted = low_bit_size(bits, count, blocks)
    if data.dtype != torch.uint8 or data.shape[-1] != wanted:
        raise ValueError(f"{wanted} bytes are {count} values, not {data.shape[-1]} of {data.dtype}")
    return data.contiguous()


def _check_blocks(count: int, blocks: Blocks | None) -> None:
    """Compiled forms read and write as much as the blocks say."""
    if blocks is not None and blocks.count != count:
        raise ValueError(f"these blocks are of {blocks.count} values, not of {count}")
