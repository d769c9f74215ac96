"""Sparse gradient exchange for PyTorch data-parallel training.

sync = gradsieve.attach(ddp, optimizer, scheme="exdyna", density=0.001)
"""

from gradsieve.errors import (
    ConfigError,
    DivergenceError,
    GradsieveError,
    LabError,
    Malformed,
    MismatchError,
    PeerError,
    ProtocolError,
)
from gradsieve.integrations.ddp import attach
from gradsieve.integrations.gradient_sync import GradientSync
from gradsieve.schemes import SCHEMES
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.dense import Dense
from gradsieve.schemes.exdyna import ExDyna
from gradsieve.schemes.exdyna_paper import ExDynaPaper
from gradsieve.schemes.micro import Micro
from gradsieve.schemes.noop import Noop
from gradsieve.schemes.topk import TopK

__version__ = "0.1.0.dev0"

__all__ = [
    "SCHEMES",
    "ConfigError",
    "Dense",
    "DivergenceError",
    "ExDyna",
    "ExDynaPaper",
    "GradientSync",
    "GradsieveError",
    "LabError",
    "Malformed",
    "Micro",
    "MismatchError",
    "Noop",
    "PeerError",
    "ProtocolError",
    "Scheme",
    "TopK",
    "attach",
]
