"""The registry: adding a scheme is its file and one line here."""

from __future__ import annotations

import difflib
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.cltk import CltK
from gradsieve.schemes.deft import Deft
from gradsieve.schemes.deft_paper import DeftPaper
from gradsieve.schemes.dense import Dense
from gradsieve.schemes.dgc import Dgc
from gradsieve.schemes.exdyna import ExDyna
from gradsieve.schemes.exdyna_paper import ExDynaPaper
from gradsieve.schemes.gaussiank import GaussianK
from gradsieve.schemes.gtopk import GTopK
from gradsieve.schemes.hard_threshold import HardThreshold
from gradsieve.schemes.micro import Micro
from gradsieve.schemes.micro_paper import MicroPaper
from gradsieve.schemes.noop import Noop
from gradsieve.schemes.oktopk import OkTopk
from gradsieve.schemes.oktopk_paper import OkTopkPaper
from gradsieve.schemes.randomk import RandomK
from gradsieve.schemes.sidco import Sidco
from gradsieve.schemes.spardl import SparDL
from gradsieve.schemes.spardl_paper import SparDLPaper
from gradsieve.schemes.stripes import Stripes
from gradsieve.schemes.topk import TopK
from gradsieve.schemes.topk_union import TopKUnion

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
