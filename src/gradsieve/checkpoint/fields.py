"""State as a flat dictionary of tensors: no pickle, every key unique to its rank.

    rank3/format                    version of this layout
    rank3/world, rank3/step
    rank3/scheme                    name of the scheme, as bytes
    rank3/layout                    hash of the units and what is kept of them, as bytes
    rank3/residual/<parameter>      what this rank has not sent of it
    rank3/own/<parameter>           its own model of it; likewise shared, mark
    rank3/figure/<name>             numbers of the pipeline
    rank3/noted/0                   gradients of unit 0 in the last step, which the next exchange sends
    rank3/common/0                  what its residual would be, had the rank moved as all did
    rank3/unit/0/<field>            fields of the scheme's State for unit 0

Rank-unique keys matter: distributed checkpointing keeps one of equal keys, which would lose all residuals
but one. What is read back is checked: names, shapes, types.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def tensor_to_text(tensor: Tensor) -> str:
    return bytes(tensor.tolist()).decode(errors="replace")


def fields_from_tensors(template: AnyState, stored: Mapping[str, Tensor], prefix: str) -> AnyState:
    """A State like `template` (a fresh one for this layout) with the stored values."""
    values: dict[str, Any] = {}
    for name in stored_fields(template):
        now = getattr(template, name)
        like = now if isinstance(now, Tensor) else number_to_tensor(now)
        found = take(stored, prefix + name, tuple(like.shape), like.dtype)
        values[name] = found.to(now.device, copy=True) if isinstance(now, Tensor) else found.item()
    return replace(template, **values)  # type: ignore[type-var]  # every State is a dataclass


def take(stored: Mapping[str, Tensor], key: str, shape: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    """The tensor under `key`, if it is what it should be."""
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


def take_text(stored: Mapping[str, Tensor], key: str) -> str:
    """A short one, such as a name."""
    found = take(stored, key, None, torch.uint8)
    if found.dim() != 1 or found.numel() > _LONGEST:
        raise Malformed(f"{key!r} in the checkpoint, of shape {tuple(found.shape)}, is not a short text")
    return printable(tensor_to_text(found))
