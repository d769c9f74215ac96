"""Schemes as text, with settings: `topk`, `gtopk:paper=true`, `spardl:teams=2+residuals=local`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gradsieve.schemes import make
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.settings import with_settings


def parse(
    text: str, density: float | None = None, fixed: Collection[str] = frozenset({"density"})
) -> Scheme[Any]:
    """The scheme that `text` names, at that density; `fixed` settings are not for the text."""
    name, colon, settings = text.partition(":")
    scheme = make(name, density)
    return with_settings(scheme, name, settings, fixed) if colon else scheme
