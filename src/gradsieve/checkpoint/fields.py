"""A rank's state as a flat dictionary of tensors: no pickle, every key unique to the rank.

    rank3/format                    version of this layout
    rank3/world, rank3/step
    rank3/scheme                    name of the scheme, as bytes
    rank3/layout                    hash of the units and of the kinds of memories, as bytes
    rank3/residual/<parameter>      residual, if gradients are exchanged
    rank3/own/<parameter>           the rank's own model, if steps are; likewise shared, mark
    rank3/figure/<name>             numbers of the pipeline
    rank3/noted/0                   gradients of unit 0 in the last step, which the next exchange sends
    rank3/common/0                  residual of unit 0 if the rank had moved as all ranks did
    rank3/unit/0/<field>            fields of the scheme's State for unit 0

Distributed checkpointing keeps one of equal keys: without the rank in them all residuals but one would be
lost. Names, shapes and types of what is read are checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradsieve.errors import Malformed, printable
from gradsieve.types import number_to_tensor, stored_fields

FORMAT = 5
_LONGEST = 64  # characters of a text that is compared

AnyState = TypeVar("AnyState")


def text_to_tensor(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def fields_from_tensors(template: AnyState, stored: Mapping[str, Tensor], prefix: str) -> AnyState:
    """Return a State like `template`, a fresh one for this layout, with the stored values."""
    values: dict[str, Any] = {}
    for name in stored_fields(template):
        now = getattr(template, name)
        like = now if isinstance(now, Tensor) else number_to_tensor(now)
        found = take(stored, prefix + name, tuple(like.shape), like.dtype)
        values[name] = found.to(now.device, copy=True) if isinstance(now, Tensor) else found.item()
    return replace(template, **values)  # type: ignore[type-var]  # every State is a dataclass


def take(stored: Mapping[str, Tensor], key: str, shape: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    """Return the tensor under `key`; raise if it has another shape or type."""
    if key not in stored:
        raise Malformed(f"the checkpoint has no {key!r}; was it saved by another rank, model or scheme?")
    tensor = stored[key]
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
        raise Malformed(f"{key!r} in the checkpoint is not a tensor of {dtype}")
    if tensor.is_meta:
        raise Malformed(f"{key!r} in the checkpoint has no data (device meta): load it to a real device")
    if shape is not None and tuple(tensor.shape) != shape:
        raise Malformed(f"{key!r} in the checkpoint has shape {tuple(tensor.shape)}, expected {shape}")
    return tensor


def take_all(stored: Mapping[str, Tensor], prefix: str, like: Sequence[Tensor]) -> list[Tensor]:
    return [take(stored, f"{prefix}{at}", tuple(each.shape), each.dtype) for at, each in enumerate(like)]


def take_text(stored: Mapping[str, Tensor], key: str, most: int = _LONGEST) -> str:
    """Return a text of up to `most` bytes, such as a name."""
    found = take(stored, key, None, torch.uint8)
    if found.dim() != 1 or found.numel() > most:
        raise Malformed(
            f"{key!r} in the checkpoint, of shape {tuple(found.shape)}, is not a text, or too long"
        )
    return printable(bytes(found.tolist()).decode(errors="replace"))
