"""Sparse gradient exchange for PyTorch data-parallel training.

sync = gradsieve.attach(ddp, optimizer)

What needs torch is loaded when it is first used (PEP 562): `gradsieve --help` and the readers of records
do not wait for it.
"""

import importlib
import typing

from gradsieve import version
from gradsieve.errors import (
    ConfigError,
    DivergenceError,
    GradsieveError,
    Malformed,
    MismatchError,
    PeerError,
    ProtocolError,
    RefusedError,
)

if typing.TYPE_CHECKING:
    from gradsieve.parallel.ddp import attach
    from gradsieve.parallel.hosts import host_mesh
    from gradsieve.pipeline.treatment import Treatment
    from gradsieve.schemes import SCHEMES
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
    from gradsieve.schemes.spardl import SparDL
    from gradsieve.schemes.stripes import Stripes
    from gradsieve.sync.gradient_sync import GradientSync
    from gradsieve.sync.recording import record


__version__ = version.VERSION

_WHERE = {
    "SCHEMES": "schemes",
    "CltK": "schemes.baselines.cltk",
    "Deft": "schemes.deft",
    "DeftPaper": "schemes.papers.deft",
    "Dense": "schemes.baselines.dense",
    "Dgc": "schemes.baselines.dgc",
    "ExDyna": "schemes.exdyna",
    "ExDynaPaper": "schemes.papers.exdyna",
    "GTopK": "schemes.baselines.gtopk",
    "GaussianK": "schemes.baselines.gaussiank",
    "GradientSync": "sync.gradient_sync",
    "HardThreshold": "schemes.baselines.hard_threshold",
    "Micro": "schemes.micro",
    "MicroPaper": "schemes.papers.micro",
    "Noop": "schemes.baselines.noop",
    "OkTopk": "schemes.oktopk",
    "OkTopkPaper": "schemes.papers.oktopk",
    "RandomK": "schemes.baselines.randomk",
    "Scheme": "schemes.base",
    "Sidco": "schemes.baselines.sidco",
    "SparDL": "schemes.spardl",
    "SparDLPaper": "schemes.papers.spardl",
    "Stripes": "schemes.stripes",
    "TopK": "schemes.baselines.topk",
    "TopKUnion": "schemes.baselines.topk_union",
    "Treatment": "pipeline.treatment",
    "attach": "parallel.ddp",
    "host_mesh": "parallel.hosts",
    "record": "sync.recording",
}
"""Which module of the package has a name; the imports above are for those who read types."""

__all__ = [
    "SCHEMES",
    "CltK",
    "ConfigError",
    "Deft",
    "DeftPaper",
    "Dense",
    "Dgc",
    "DivergenceError",
    "ExDyna",
    "ExDynaPaper",
    "GTopK",
    "GaussianK",
    "GradientSync",
    "GradsieveError",
    "HardThreshold",
    "Malformed",
    "Micro",
    "MicroPaper",
    "MismatchError",
    "Noop",
    "OkTopk",
    "OkTopkPaper",
    "PeerError",
    "ProtocolError",
    "RandomK",
    "RefusedError",
    "Scheme",
    "Sidco",
    "SparDL",
    "SparDLPaper",
    "Stripes",
    "TopK",
    "TopKUnion",
    "Treatment",
    "attach",
    "host_mesh",
    "record",
]


def __getattr__(name: str) -> typing.Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
