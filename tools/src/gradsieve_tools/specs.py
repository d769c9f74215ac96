"""Schemes and exchanges are given as text on command lines, as `spardl:teams=2+residuals=local`.

A comma separates things on the command line, so a plus separates their settings. A setting is a field of a
frozen dataclass; its type says how the value is read.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import fields, replace
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gradsieve import Gradients, Steps
from gradsieve.errors import ConfigError
from gradsieve.schemes import Scheme, make
from gradsieve.testing import Exchange

Settable = TypeVar("Settable")
_PLAIN = (bool, int, float, str)


def parse(
    text: str, density: float | None = None, fixed: Collection[str] = frozenset({"density"})
) -> Scheme[Any]:
    """Reads a scheme with its settings, as `topk` or `gtopk:paper=true`; those in `fixed` cannot be given."""

    name, colon, settings = text.partition(":")
    scheme = make(name, density)
    return with_settings(scheme, name, settings, fixed) if colon else scheme


def parse_exchange(text: str, scheme: Scheme[Any]) -> Exchange:
    """Reads `default`, `paper`, `steps:every=4`, `gradients:small=0`."""
    name, colon, settings = text.partition(":")
    kinds: dict[str, Exchange] = {"steps": Steps(), "gradients": Gradients()}
    if name in kinds:
        return with_settings(kinds[name], name, settings) if colon else kinds[name]
    if text == "paper":
        return Gradients(small=0)
    if text == "default":
        return Gradients() if scheme.lossless else Steps()
    raise ConfigError(
        f"there are no exchange settings {text!r}: it is default, paper, or steps or gradients with "
        "settings, such as steps:every=4"
    )


def with_settings(thing: Settable, name: str, settings: str, fixed: Collection[str] = ()) -> Settable:
    """`thing` with the settings that the text after its name gives; `fixed` fields are not for the text."""
    types = {field: plain for field, plain in _settable(type(thing)).items() if field not in fixed}
    given = {}
    for setting in settings.split("+"):
        field, equals, value = setting.partition("=")
        if not equals or field not in types:
            there = ", ".join(types) or "none"
            raise ConfigError(f"{name} has no setting {setting!r}; settings are field=value, fields: {there}")
        given[field] = _read(value, types[field], f"{name + ':' + settings!r}: {field}")
    return replace(thing, **given)  # type: ignore[type-var]  # a dataclass


def _settable(kind: type[Any]) -> dict[str, list[Any]]:
    """Fields that one word can set, with the types to read it as."""
    hints = get_type_hints(kind)
    types = {field.name: _plain(hints[field.name]) for field in fields(kind)}
    return {name: plain for name, plain in types.items() if plain}


def _plain(hint: Any) -> list[Any]:
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
    """Return all values of a type that has few."""
    return {"true": True, "false": False} if kind is bool else {str(value): value for value in get_args(kind)}
