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
    MismatchError,
    PeerError,
    RefusedError,
)

if typing.TYPE_CHECKING:
    from gradsieve import schemes, testing
    from gradsieve.attaching import attach
    from gradsieve.parallel.hsdp import host_mesh
    from gradsieve.pipeline.exchange_settings import Gradients, Steps
    from gradsieve.recording import record
    from gradsieve.sync import GradientSync

__version__ = version.VERSION

_WHERE = {  # the module of each public name; the imports above are for type checkers
    "GradientSync": "sync",
    "Gradients": "pipeline.exchange_settings",
    "Steps": "pipeline.exchange_settings",
    "attach": "attaching",
    "host_mesh": "parallel.hsdp",
    "record": "recording",
}
_MODULES = ("schemes", "testing")

__all__ = [
    "ConfigError",
    "DivergenceError",
    "GradientSync",
    "Gradients",
    "GradsieveError",
    "MismatchError",
    "PeerError",
    "RefusedError",
    "Steps",
    "attach",
    "host_mesh",
    "record",
    "schemes",
    "testing",
]


def __getattr__(name: str) -> typing.Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
