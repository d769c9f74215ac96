"""Nested state, such as an optimizer's, as a text and tensors: no pickle.

The text is JSON in which a tensor is {"tensor": its number}, a tuple {"tuple": [...]}, and a dictionary,
whose keys are strings and numbers, {"dict": [[key, value], ...]}. Floats come back to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradsieve.errors import ConfigError, Malformed


def taken_apart(tree: Any) -> tuple[str, list[Tensor]]:
    tensors: list[Tensor] = []
    return json.dumps(_plain(tree, tensors), separators=(",", ":")), tensors


def put_together(text: str, tensors: Sequence[Tensor]) -> Any:
    try:
        return _tree(json.loads(text), tensors)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise Malformed(f"nested state in the checkpoint cannot be read: {error}") from error


def _plain(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return {"tensor": len(tensors) - 1}
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    if type(tree) is list:
        return [_plain(each, tensors) for each in tree]
    if type(tree) is tuple:
        return {"tuple": [_plain(each, tensors) for each in tree]}
    if isinstance(tree, dict) and all(type(key) in (int, str) for key in tree):
        return {"dict": [[key, _plain(value, tensors)] for key, value in tree.items()]}
    raise ConfigError(f"state of type {type(tree).__name__} cannot be saved without pickle")


def _tree(plain: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(plain, list):
        return [_tree(each, tensors) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, inside),) = plain.items()
    if kind == "tensor" and type(inside) is int and inside >= 0:
        return tensors[inside]
    if kind == "tuple" and isinstance(inside, list):
        return tuple(_tree(each, tensors) for each in inside)
    if kind == "dict" and isinstance(inside, list):
        return {_key(key): _tree(value, tensors) for key, value in inside}
    raise ValueError(f"there is no {kind!r}")


def _key(key: Any) -> int | str:
    if type(key) not in (int, str):
        raise ValueError(f"{key!r} is no key")
    return key  # type: ignore[no-any-return]  # checked just above
