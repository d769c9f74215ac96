"""The sync stays small: what its users see, and the methods of the classes that it is made of."""

from __future__ import annotations

from types import FunctionType

from gradsieve.attached import Attached
from gradsieve.parallel.ddp import DdpSync
from gradsieve.runner import Runner
from gradsieve.sync import GradientSync

PUBLIC, METHODS = 18, 35  # an ADR raises them
BEHIND = 18  # methods of the runner, which has the exchange under way


def methods_of(*classes: type) -> int:
    """Properties and methods with underscores count, too."""
    kinds = (FunctionType, property, classmethod, staticmethod)
    return sum(isinstance(each, kinds) for kind in classes for each in vars(kind).values())


def test_what_users_see() -> None:
    assert len([name for name in dir(DdpSync) if not name.startswith("_")]) <= PUBLIC


def test_methods_of_all_its_classes() -> None:
    assert methods_of(GradientSync, Attached, DdpSync) <= METHODS
    assert methods_of(Runner) <= BEHIND
