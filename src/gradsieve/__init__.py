"""Sparse gradient exchange for PyTorch data-parallel training.

sync = gradsieve.attach(ddp, optimizer)

What needs torch is loaded when it is first used (PEP 562): `gradsieve --help`, the lab and the readers of
records do not wait for it.
"""

import importlib
import typing

from gradsieve.errors import (
    ConfigError,
    DivergenceError,
    GradsieveError,
    LabError,
    Malformed,
    MismatchError,
    PeerError,
    ProtocolError,
    RefusedError,
    SimulationError,
)

if typing.TYPE_CHECKING:
    from gradsieve.feedback.treatment import Treatment
    from gradsieve.integrations.ddp import attach
    from gradsieve.integrations.gradient_sync import GradientSync
    from gradsieve.integrations.hosts import host_mesh
    from gradsieve.integrations.recorder import record
    from gradsieve.schemes import SCHEMES
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

__version__ = "0.1.0.dev0"

_WHERE = {
    "SCHEMES": "schemes",
    "CltK": "schemes.cltk",
    "Deft": "schemes.deft",
    "DeftPaper": "schemes.deft_paper",
    "Dense": "schemes.dense",
    "Dgc": "schemes.dgc",
    "ExDyna": "schemes.exdyna",
    "ExDynaPaper": "schemes.exdyna_paper",
    "GTopK": "schemes.gtopk",
    "GaussianK": "schemes.gaussiank",
    "GradientSync": "integrations.gradient_sync",
    "HardThreshold": "schemes.hard_threshold",
    "Micro": "schemes.micro",
    "MicroPaper": "schemes.micro_paper",
    "Noop": "schemes.noop",
    "OkTopk": "schemes.oktopk",
    "OkTopkPaper": "schemes.oktopk_paper",
    "RandomK": "schemes.randomk",
    "Scheme": "schemes.base",
    "Sidco": "schemes.sidco",
    "SparDL": "schemes.spardl",
    "SparDLPaper": "schemes.spardl_paper",
    "Stripes": "schemes.stripes",
    "TopK": "schemes.topk",
    "TopKUnion": "schemes.topk_union",
    "Treatment": "feedback.treatment",
    "attach": "integrations.ddp",
    "host_mesh": "integrations.hosts",
    "record": "integrations.recorder",
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
    "LabError",
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
    "SimulationError",
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
