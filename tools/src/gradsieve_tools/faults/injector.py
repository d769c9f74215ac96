"""Lets a fault happen before an op, and counts the ops of every step whether one does or not."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gradsieve.comm.engine import Engine
from gradsieve.schemes import Op
from gradsieve_tools.faults.kinds import Fault, strike


class Injector:
    """Between an engine and the ops it performs, from its making on."""

    def __init__(
        self, engine: Engine, step: Callable[[], int], fault: Fault | None, tell: Callable[[], None]
    ) -> None:
        """`step` says which one an op belongs to; `tell` is called just before the fault."""
        self._step, self._fault, self._tell = step, fault, tell
        self._usual = engine.perform
        self.ops: dict[int, list[str]] = {}
        """By step, as many as were begun."""
        engine.perform = self._perform  # type: ignore[method-assign]  # the seam that is wrapped

    def _perform(self, op: Op) -> Tensor:
        step, fault = self._step(), self._fault
        before = self.ops.setdefault(step, [])
        if fault is not None and (fault.step, fault.op) == (step, len(before)):
            self._tell()
            strike(fault.kind)
        before.append(type(op).__name__)
        return self._usual(op)
