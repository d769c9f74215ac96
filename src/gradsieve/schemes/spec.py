"""Schemes as text, with settings: `topk`, `gtopk:paper=true`, `spardl:teams=2+residuals=local`.

A comma separates schemes on the command line, so a plus separates settings. A setting is a field of the
scheme; its type says how the value is read.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gradsieve.errors import ConfigError
from gradsieve.schemes import make
from gradsieve.schemes.base import Scheme

_PLAIN = (bool, int, float, str)


def parse(text: str, density: float | None = None) -> Scheme[Any]:
    """The scheme that `text` names, at that density."""
    name, colon, settings = text.partition(":")
    scheme = make(name, density)
    if not colon:
        return scheme
    types = _settable(type(scheme))
    given = {}
    for setting in settings.split("+"):
        field, equals, value = setting.partition("=")
        if not equals or field not in types:
            there = ", ".join(types) or "none"
            raise ConfigError(f"{name} has no setting {setting!r}; settings are field=value, fields: {there}")
        given[field] = _read(value, types[field], f"{text!r}: {field}")
    return replace(scheme, **given)


def _settable(kind: type[Scheme[Any]]) -> dict[str, list[Any]]:
    """Fields that one word can set, with the types to read it as; the density is the caller's."""
    hints = get_type_hints(kind)
    types = {field.name: _plain(hints[field.name]) for field in fields(kind) if field.name != "density"}
    return {name: plain for name, plain in types.items() if plain}


def _plain(hint: Any) -> list[Any]:
    """Those alternatives of a type that a word can be read as."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [part for part in parts if part in _PLAIN or get_origin(part) is Literal]


def _read(value: str, types: list[Any], what: str) -> Any:
    words = {word: meant for kind in types for word, meant in _words(kind).items()}
    if value in words:
        return words[value]
    open_ended = [kind for kind in types if not _words(kind)]
    for kind in open_ended:
        with suppress(ValueError):
            return kind(value)
    choice = [*words, *(f"of type {kind.__name__}" for kind in open_ended)]
    raise ConfigError(f"{what} must be {' or '.join(choice)}, not {value!r}")


def _words(kind: Any) -> dict[str, Any]:
    """All values of a type that has few."""
    return {"true": True, "false": False} if kind is bool else {str(value): value for value in get_args(kind)}
