"""Nested state, such as an optimizer's, as a text and plain tensors: no pickle.

The text is JSON in which a tensor is {"tensor": its number}, a tuple {"tuple": [...]}, and a dictionary,
whose keys are strings and numbers, {"dict": [[key, value], ...]}. Floats come back to the last bit.

A tensor of a subclass, such as a quantised moment, is {"parts": [[name, tensor], ...]}, the plain tensors
that it is made of. Its class is in no file: `made_like` takes the class from an object of this process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradsieve.checkpoint.tensors import parsed
from gradsieve.errors import ConfigError, Malformed, printable


@dataclass(frozen=True, slots=True)
class Parts:
    """Hold the plain tensors of a subclass that the file does not name."""

    inner: Mapping[str, Any]


def taken_apart(tree: Any) -> tuple[str, list[Tensor]]:
    tensors: list[Tensor] = []
    return json.dumps(_plain(tree, tensors), separators=(",", ":")), tensors


def put_together(text: str, tensors: Sequence[Tensor]) -> Any:
    try:
        return _tree(parsed(text), tensors)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise Malformed(
            f"nested state in the checkpoint cannot be read: {printable(str(error))[:240]}"
        ) from None


def has_parts(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(map(has_parts, tree.values()))
    return isinstance(tree, Parts) or (isinstance(tree, list | tuple) and any(map(has_parts, tree)))


def made_like(stored: Any, like: Any) -> Any:
    """Make tensors of subclasses out of parts: classes, types, shapes and other attributes are those that
    `like` has in the same places, and only numbers are what was stored."""
    if isinstance(stored, dict):
        known = like if isinstance(like, Mapping) else {}
        return {key: made_like(each, known.get(key)) for key, each in stored.items()}
    if isinstance(stored, list | tuple):
        items = like if isinstance(like, list | tuple) and len(like) == len(stored) else [None] * len(stored)
        return type(stored)(made_like(*pair) for pair in zip(stored, items, strict=True))
    if not isinstance(stored, Parts):
        return stored
    if not isinstance(like, Tensor) or not hasattr(like, "__tensor_flatten__"):
        raise Malformed(
            "an optimizer's state in the checkpoint holds a tensor subclass that this optimizer has not there"
        )
    names, context = like.__tensor_flatten__()
    if [*stored.inner] != [*names]:
        raise Malformed(f"a {type(like).__name__} is made of {', '.join(names)}, not of what is stored")
    inner = {name: made_like(stored.inner[name], getattr(like, name)) for name in names}
    for name, part in inner.items():
        own = getattr(like, name)
        if not isinstance(part, Tensor) or (part.shape, part.dtype) != (own.shape, own.dtype):
            raise Malformed(f"{name} of a {type(like).__name__} is stored in another shape or type")
        inner[name] = part.to(own.device)
    kind: Any = type(like)
    return kind.__tensor_unflatten__(inner, context, like.size(), like.stride())


def _plain(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        if hasattr(tree, "__tensor_flatten__"):
            names, _ = tree.__tensor_flatten__()
            return {"parts": [[name, _plain(getattr(tree, name), tensors)] for name in names]}
        tensors.append(tree)
        return {"tensor": len(tensors) - 1}
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    if type(tree) is list:
        return [_plain(item, tensors) for item in tree]
    if type(tree) is tuple:
        return {"tuple": [_plain(item, tensors) for item in tree]}
    if isinstance(tree, dict) and all(type(key) in (int, str) for key in tree):
        return {"dict": [[key, _plain(value, tensors)] for key, value in tree.items()]}
    raise ConfigError(f"state of type {type(tree).__name__} cannot be saved without pickle")


def _tree(plain: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(plain, list):
        return [_tree(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, inside),) = plain.items()
    if kind == "tensor" and type(inside) is int and inside >= 0:
        return tensors[inside]
    if not isinstance(inside, list) or kind not in ("tuple", "dict", "parts"):
        raise ValueError(f"there is no {kind!r}")
    if kind == "tuple":
        return tuple(_tree(item, tensors) for item in inside)
    if not all(type(key) in (int, str) for key, _ in inside):
        raise ValueError("a key is neither a number nor a text")
    pairs = {key: _tree(value, tensors) for key, value in inside}
    return pairs if kind == "dict" else Parts(pairs)
