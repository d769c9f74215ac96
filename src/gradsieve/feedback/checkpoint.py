"""State as a flat dictionary of tensors: no pickle, every key unique to its rank.

    rank3/format                    version of this layout
    rank3/world, rank3/step
    rank3/scheme                    name of the scheme, as bytes
    rank3/residual/<parameter>      what this rank has not sent of it
    rank3/own/<parameter>           its own model of it; likewise shared, mark, velocity, estimate, total
    rank3/figure/<name>             numbers of the pipeline
    rank3/noted/0                   gradients of unit 0 in the last step, which the next exchange sends
    rank3/common/0                  what its residual would be, had the rank moved as all did; later
    rank3/unit/0/<field>            fields of the scheme's State for unit 0

Rank-unique keys matter: distributed checkpointing keeps one of equal keys, which would lose all residuals
but one. What is read back is checked: version, rank, world, names, shapes, types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradsieve.errors import Malformed
from gradsieve.types import stored_fields

FORMAT = 4
LATER_FIGURES = {"gradients_seen": 0.0}
"""Numbers of the pipeline that older files of this format do not have, and what they are there."""

AnyState = TypeVar("AnyState")


def text_to_tensor(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def number_to_tensor(number: float) -> Tensor:
    dtype = torch.float64 if isinstance(number, float) else torch.int64
    return torch.tensor(number, dtype=dtype, device="cpu")


def tensor_to_text(tensor: Tensor) -> str:
    return bytes(tensor.tolist()).decode(errors="replace")


def fields_to_tensors(state: Any, prefix: str) -> dict[str, Tensor]:
    """Every field of a scheme's State but static ones: tensors as they are, numbers as float64 or int64."""
    out = {}
    for name in stored_fields(state):
        value = getattr(state, name)
        out[prefix + name] = value.clone() if isinstance(value, Tensor) else number_to_tensor(value)
    return out


def fields_from_tensors(template: AnyState, stored: Mapping[str, Tensor], prefix: str) -> AnyState:
    """A State like `template` (a fresh one for this layout) with the stored values."""
    values: dict[str, Any] = {}
    for field in fields(template):  # type: ignore[arg-type]  # every State is a dataclass
        now = values[field.name] = getattr(template, field.name)
        if field.metadata.get("static"):
            continue
        if field.metadata.get("later") and prefix + field.name not in stored:
            continue
        shape = now.shape if isinstance(now, Tensor) else ()
        dtype = (
            now.dtype if isinstance(now, Tensor) else torch.float64 if isinstance(now, float) else torch.int64
        )
        found = take(stored, prefix + field.name, tuple(shape), dtype)
        values[field.name] = found.to(now.device, copy=True) if isinstance(now, Tensor) else found.item()
    return type(template)(**values)


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


def take_figure(stored: Mapping[str, Tensor], prefix: str, name: str) -> float:
    key = f"{prefix}figure/{name}"
    if name in LATER_FIGURES and key not in stored:
        return LATER_FIGURES[name]
    return float(take(stored, key, (), torch.float64))
