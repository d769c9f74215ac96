"""Schemes are registered here by name, and imported when they are asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Op
from gradsieve.errors import ConfigError
from gradsieve.schemes.base import Agreed, Scheme, Values
from gradsieve.types import (
    Ctx,
    Outcome,
    Program,
    Result,
    Sparse,
    by_way_of,
    check_density,
    static,
    target_count,
)
from gradsieve.wire.values import VALUE_CODECS

if TYPE_CHECKING:
    from gradsieve.schemes.baselines.dense import Dense
    from gradsieve.schemes.baselines.noop import Noop
    from gradsieve.schemes.baselines.randomk import RandomK
    from gradsieve.schemes.baselines.topk import TopK
    from gradsieve.schemes.baselines.topk_union import TopKUnion
    from gradsieve.schemes.deft import Deft
    from gradsieve.schemes.exdyna import ExDyna
    from gradsieve.schemes.micro import Micro
    from gradsieve.schemes.oktopk import OkTopk
    from gradsieve.schemes.papers.deft import DeftPaper
    from gradsieve.schemes.papers.exdyna import ExDynaPaper
    from gradsieve.schemes.papers.micro import MicroPaper
    from gradsieve.schemes.papers.oktopk import OkTopkPaper
    from gradsieve.schemes.papers.spardl import SparDLPaper
    from gradsieve.schemes.spardl import SparDL
    from gradsieve.schemes.stripes import Stripes
    from gradsieve.wire.indices import INDEX_CODECS

__all__ = [
    "INDEX_CODECS", "SCHEMES", "VALUE_CODECS", "Agreed", "AllGather", "AllReduce", "AllToAll",
    "Broadcast", "Ctx", "Deft", "DeftPaper", "Dense", "ExDyna", "ExDynaPaper", "Exchange", "Micro",
    "MicroPaper", "Noop", "OkTopk", "OkTopkPaper", "Op", "Outcome", "Program", "RandomK", "Result",
    "Scheme", "SparDL", "SparDLPaper", "Sparse", "Stripes", "TopK", "TopKUnion", "Values", "by_way_of",
    "check_density", "make", "static", "target_count",
]  # fmt: skip

# Other packages add schemes of theirs by entry points of this group: a name, and "module:Class".
GROUP = "gradsieve.schemes"
_PLACES = {
    "noop": "baselines.noop:Noop",
    "dense": "baselines.dense:Dense",
    "topk": "baselines.topk:TopK",
    "topk-union": "baselines.topk_union:TopKUnion",
    "randomk": "baselines.randomk:RandomK",
    "stripes": "stripes:Stripes",
    "deft": "deft:Deft",
    "oktopk": "oktopk:OkTopk",
    "spardl": "spardl:SparDL",
    "micro": "micro:Micro",
    "exdyna": "exdyna:ExDyna",
    "exdyna-paper": "papers.exdyna:ExDynaPaper",
    "micro-paper": "papers.micro:MicroPaper",
    "deft-paper": "papers.deft:DeftPaper",
    "oktopk-paper": "papers.oktopk:OkTopkPaper",
    "spardl-paper": "papers.spardl:SparDLPaper",
}
_IN_TOOLS = ("gtopk", "cltk", "hard-threshold", "gaussiank", "sidco", "dgc")


class Registry(MutableMapping[str, type[Scheme[Any]]]):
    """A registry imports the class of a scheme when its name is asked for. Other classes may be put in."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._known: dict[str, str | type[Scheme[Any]]] = dict(places)
        self._has_entry_points = False

    def _all(self) -> dict[str, str | type[Scheme[Any]]]:
        if not self._has_entry_points:
            self._has_entry_points = True
            for entry in entry_points(group=GROUP):
                self._known.setdefault(entry.name, entry.value)
        return self._known

    def __getitem__(self, name: str) -> type[Scheme[Any]]:
        known = self._known.get(name) or self._all()[name]
        if isinstance(known, str):
            module, _, kind = known.partition(":")
            known = self._known[name] = getattr(importlib.import_module(module), kind)
        return known

    def __setitem__(self, name: str, kind: type[Scheme[Any]]) -> None:
        self._known[name] = kind

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def name_of(self, kind: type[Scheme[Any]]) -> str:
        """Returns the name that a class is registered by, or else its own; imports nothing."""
        same = (kind, f"{kind.__module__}:{kind.__qualname__}")
        return next((name for name, known in self._all().items() if known in same), kind.__name__)


SCHEMES = Registry({name: f"{__name__}.{place}" for name, place in _PLACES.items()})


def __getattr__(name: str) -> Any:
    if name == "INDEX_CODECS":
        return importlib.import_module("gradsieve.wire.indices").INDEX_CODECS
    for scheme, place in _PLACES.items():
        if place.endswith(f":{name}"):
            return SCHEMES[scheme]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make(scheme: str | Scheme[Any], density: float | None = None) -> Scheme[Any]:
    """Returns the scheme of this name, or the given object itself."""
    if isinstance(scheme, Scheme):
        if density is not None and density != scheme.density:
            raise ConfigError(
                f"density={density} given, but the scheme object says {scheme.density}: drop one"
            )
        return scheme
    if scheme not in SCHEMES:
        if scheme in _IN_TOOLS:
            raise ConfigError(f"{scheme!r} is in another package: pip install gradsieve-tools")
        near = difflib.get_close_matches(str(scheme), SCHEMES, 1)
        hint = f"did you mean {near[0]!r}? There are: " if near else "there are: "
        raise ConfigError(f"no scheme is called {scheme!r}; {hint}{', '.join(SCHEMES)}")
    kind = SCHEMES[scheme]
    return kind() if density is None or kind.lossless else kind(density=density)
