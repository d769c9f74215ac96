"""The nouns of the library, and the letters every file uses for them.

    n      elements in one bucket            P, world   ranks in the group
    k      elements to send per step         r, rank    this rank
    g      this rank's gradient              t, step    iterations committed so far
    e      residual: what was not sent yet   acc        e + g, what could be sent now

The law of the library: over all ranks, the sum of `spent` equals `update`, element by element.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from functools import cache
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradsieve.errors import ConfigError

State = TypeVar("State")
Result = TypeVar("Result")


def private(default: Any) -> Any:
    """A field of a State that is this rank's own; all other fields are the same bits on every rank."""
    return field(default=default, metadata={"private": True})


def later() -> Any:
    """A field of a State that checkpoints of earlier versions lack: from such a one it begins again."""
    return field(metadata={"later": True})


def static(default: Any) -> Any:
    """A field of a State that follows from the layout of the model alone: no checkpoint has it."""
    return field(default=default, metadata={"static": True})


def stored_fields(state: Any) -> list[str]:
    return [field.name for field in fields(state) if not field.metadata.get("static")]


def replicated_fields(state: Any) -> list[str]:
    private = {field.name for field in fields(state) if field.metadata.get("private")}
    return [name for name in stored_fields(state) if name not in private]


Program: TypeAlias = Generator[Any, Tensor, Result]
"""A computation that yields communication ops (`gradsieve.comm.ops`) and is sent their replies."""


def by_way_of(program: Program[Result], perform: Callable[[Any], Program[Tensor]]) -> Program[Result]:
    """`program`, of which every op is left to `perform`: that asks for it, or for another, and replies."""
    reply: Tensor | None = None
    while True:
        try:
            op = program.send(reply)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as end:
            result: Result = end.value
            return result
        reply = yield from perform(op)


Host: TypeAlias = NDArray[np.int64]
"""Indices in the host's memory: numpy there, torch on the device, so that a synchronisation shows."""


def to_host(tensor: Tensor) -> NDArray[Any]:
    """A tensor's elements for numpy. On an accelerator the host waits here for all that was queued."""
    array: NDArray[Any] = tensor.cpu().numpy()
    return array


def to_device(values: NDArray[Any] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host. They go to an accelerator through pinned memory, so that the host goes on."""
    host = torch.as_tensor(values, dtype=dtype, device="cpu")
    if device.type == "cpu" or not can_pin():
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


@cache
def can_pin() -> bool:
    """Not every accelerator has such memory."""
    try:
        torch.empty(1, dtype=torch.uint8, device="cpu", pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


class Vector(Protocol):
    """A vector whose elements are computed when they are read."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def numel(self) -> int: ...

    def between(self, start: int, stop: int) -> Tensor:
        """Computed into memory that is the caller's until the next call."""
        ...

    def select(
        self, start: int, stop: int, threshold: float, capacity: int, phase: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `kernels.select` of the elements from `start` to `stop`; indices are relative to `start`."""
        ...

    def at(self, host: Host, indices: Tensor) -> Tensor:
        """The values at sorted indices, given on the host and on the device."""
        ...


class Stream(Protocol):
    """Values that are computed when they are read, from the first one to the last."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def numel(self) -> int: ...

    def pieces(self) -> Iterator[Tensor]:
        """In order, end to end; each is the caller's until the next one is asked for."""
        ...

    def bounds(self) -> Tensor:
        """Some values, few where that is possible: where these are finite, all are."""
        ...


def gathered(source: Tensor | Stream, buffer: Tensor | None = None) -> Tensor:
    """All values, in memory: where they have to be computed, in this one, if there is some."""
    if isinstance(source, Tensor):
        return source
    values = (
        torch.empty(source.numel(), dtype=source.dtype, device=source.device) if buffer is None else buffer
    )
    start = 0
    for piece in source.pieces():
        values[start : start + piece.numel()] = piece
        start += piece.numel()
    return values


@dataclass(frozen=True, slots=True)
class Sparse:
    """Some elements of a vector of `numel`; every other element is zero.

    `indices` are sorted and unique. `None` stands for a run of elements from `start` on: a dense vector, or a
    stretch of one, needs no index.
    """

    indices: Tensor | None
    source: Tensor | Stream
    """The values, or what they are computed from."""
    numel: int
    host: Host | None = None
    """The indices once more, where they were on the host before they were on the device."""
    start: int = 0
    """Of a run."""

    @classmethod
    def full(cls, values: Tensor) -> Sparse:
        return cls(None, values, values.numel())

    @classmethod
    def run(cls, start: int, values: Tensor | Stream, numel: int) -> Sparse:
        return cls(None, values, numel, start=start)

    @property
    def stop(self) -> int:
        """Of a run."""
        return self.start + self.count

    @property
    def count(self) -> int:
        return self.source.numel()

    @property
    def values(self) -> Tensor:
        """Computed each time, where they come from a stream."""
        return gathered(self.source)

    def pieces(self) -> Iterator[Tensor]:
        """The values, as a `Stream` gives them."""
        return iter((self.source,)) if isinstance(self.source, Tensor) else self.source.pieces()

    def parts(self) -> Iterator[Sparse]:
        """The same piece by piece, each with its place."""
        start = self.start
        for piece in self.pieces():
            yield replace(self, source=piece, start=start)
            start += piece.numel()

    def bounds(self) -> Tensor:
        """As a `Stream` gives them."""
        return self.source if isinstance(self.source, Tensor) else self.source.bounds()

    def on_host(self) -> Host:
        """The indices, where the host can read them."""
        assert self.indices is not None
        return to_host(self.indices) if self.host is None else self.host

    def listed(self) -> Tensor:
        """The indices, also those of a run."""
        if self.indices is not None:
            return self.indices
        return torch.arange(self.start, self.stop, dtype=torch.int64, device=self.source.device)

    def to_dense(self) -> Tensor:
        if self.count == self.numel:
            return self.values.clone()
        out = torch.zeros(self.numel, dtype=self.source.dtype, device=self.source.device)
        out[self.where] = self.values
        return out

    @property
    def where(self) -> Tensor | slice:
        """What picks these elements out of a whole vector."""
        return slice(self.start, self.stop) if self.indices is None else self.indices

    def subtract_from(self, vector: Tensor) -> None:
        """vector -= self, touching only the elements present."""
        for part in self.parts():
            vector[part.where] -= part.values


@dataclass(frozen=True, slots=True)
class Outcome(Generic[State]):
    """What one step of a scheme means for everybody and for this rank. Nothing is mutated before commit."""

    update: Sparse
    """Identical on every rank: the sum of what all ranks spent."""
    spent: Sparse
    """This rank's own contribution to `update`; the rest of `acc` stays in its residual."""
    state: State
    """The scheme's state for the next step."""


@dataclass(frozen=True, slots=True)
class Ctx:
    """Where and when a scheme runs."""

    rank: int
    world: int
    step: int


def target_count(density: float, n: int) -> int:
    """k = floor(density * n), at least 1 of a non-empty vector.

    The shortest decimal of `density` is what the user wrote; exact integer arithmetic on it gives 29 for
    0.29 of 100, where the product of two floats gives 28.
    """
    return min(n, max(1, int(Decimal(repr(density)) * n)))


def is_number(value: object) -> bool:
    """Also NumPy's; a text is none, nor is True."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_density(density: float) -> None:
    if not is_number(density):
        raise ConfigError(f"density={density!r} is a {type(density).__name__}: give a number, density=0.001")
    if not 0.0 < density <= 1.0:
        raise ConfigError(
            f"density must be above 0 and at most 1, not {density!r} (0.001 sends 0.1 % a step)"
        )
