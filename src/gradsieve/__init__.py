"""Sparse gradient exchange for PyTorch data-parallel training.

sync = gradsieve.attach(ddp, optimizer)
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
    SimulationError,
)
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
