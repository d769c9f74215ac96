"""Schemes by name, and what a scheme is written with: adding one is its file and one line here."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Op
from gradsieve.errors import ConfigError
from gradsieve.schemes.agreed import Agreed, Values
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.baselines.cltk import CltK
from gradsieve.schemes.baselines.dense import Dense
from gradsieve.schemes.baselines.dgc import Dgc
from gradsieve.schemes.baselines.gaussiank import GaussianK
from gradsieve.schemes.baselines.gtopk import GTopK
from gradsieve.schemes.baselines.hard_threshold import HardThreshold
from gradsieve.schemes.baselines.noop import Noop
from gradsieve.schemes.baselines.randomk import RandomK
from gradsieve.schemes.baselines.sidco import Sidco
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
from gradsieve.schemes.settings import with_settings
from gradsieve.schemes.spardl import SparDL
from gradsieve.schemes.stripes import Stripes
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
from gradsieve.wire.indices import INDEX_CODECS
from gradsieve.wire.values import VALUE_CODECS

__all__ = [
    "INDEX_CODECS",
    "SCHEMES",
    "VALUE_CODECS",
    "Agreed",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "CltK",
    "Ctx",
    "Deft",
    "DeftPaper",
    "Dense",
    "Dgc",
    "ExDyna",
    "ExDynaPaper",
    "Exchange",
    "GTopK",
    "GaussianK",
    "HardThreshold",
    "Micro",
    "MicroPaper",
    "Noop",
    "OkTopk",
    "OkTopkPaper",
    "Op",
    "Outcome",
    "Program",
    "RandomK",
    "Result",
    "Scheme",
    "Sidco",
    "SparDL",
    "SparDLPaper",
    "Sparse",
    "Stripes",
    "TopK",
    "TopKUnion",
    "Values",
    "by_way_of",
    "check_density",
    "make",
    "parse",
    "static",
    "target_count",
    "with_settings",
]

SCHEMES: dict[str, type[Scheme[Any]]] = {
    "noop": Noop,
    "dense": Dense,
    "topk": TopK,
    "topk-union": TopKUnion,
    "gtopk": GTopK,
    "cltk": CltK,
    "randomk": RandomK,
    "stripes": Stripes,
    "deft": Deft,
    "hard-threshold": HardThreshold,
    "gaussiank": GaussianK,
    "sidco": Sidco,
    "dgc": Dgc,
    "oktopk": OkTopk,
    "spardl": SparDL,
    "micro": Micro,
    "exdyna": ExDyna,
    "exdyna-paper": ExDynaPaper,
    "micro-paper": MicroPaper,
    "deft-paper": DeftPaper,
    "oktopk-paper": OkTopkPaper,
    "spardl-paper": SparDLPaper,
}


def make(scheme: str | Scheme[Any], density: float | None = None) -> Scheme[Any]:
    """A scheme from its name, or the given object itself."""
    if isinstance(scheme, Scheme):
        if density is not None and density != scheme.density:
            raise ConfigError(
                f"density={density} given, but the scheme object says {scheme.density}: drop one"
            )
        return scheme
    if scheme not in SCHEMES:
        near = difflib.get_close_matches(str(scheme), SCHEMES, 1)
        hint = f"did you mean {near[0]!r}? There are: " if near else "there are: "
        raise ConfigError(f"no scheme is called {scheme!r}; {hint}{', '.join(SCHEMES)}")
    kind = SCHEMES[scheme]
    return kind() if density is None or kind.lossless else kind(density=density)


def parse(
    text: str, density: float | None = None, fixed: Collection[str] = frozenset({"density"})
) -> Scheme[Any]:
    """A scheme from text, with settings: `topk`, `gtopk:paper=true`, `spardl:teams=2+residuals=local`; at
    that density. `fixed` settings are not for the text."""
    name, colon, settings = text.partition(":")
    scheme = make(name, density)
    return with_settings(scheme, name, settings, fixed) if colon else scheme
