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
    """A private field of a State is this rank's own; all other fields are the same bits on every rank."""
    return field(default=default, metadata={"private": True})


def static(default: Any) -> Any:
    """A static field of a State follows from the layout of the model alone: no checkpoint has it."""
    return field(default=default, metadata={"static": True})


def stored_fields(state: Any) -> list[str]:
    return [field.name for field in fields(state) if not field.metadata.get("static")]


def fields_to_tensors(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the stored fields of a scheme's State: tensors as they are, numbers as float64 or int64."""
    values = {prefix + name: getattr(state, name) for name in stored_fields(state)}
    return {k: v.clone() if isinstance(v, Tensor) else number_to_tensor(v) for k, v in values.items()}


def number_to_tensor(number: float) -> Tensor:
    dtype = torch.float64 if isinstance(number, float) else torch.int64
    return torch.tensor(number, dtype=dtype, device="cpu")


def replicated_fields(state: Any) -> list[str]:
    private = {field.name for field in fields(state) if field.metadata.get("private")}
    return [name for name in stored_fields(state) if name not in private]


# A computation that yields communication ops (`gradsieve.comm.ops`) and is sent their replies.
Program: TypeAlias = Generator[Any, Tensor, Result]


def by_way_of(program: Program[Result], perform: Callable[[Any], Program[Tensor]]) -> Program[Result]:
    """Runs `program` with every op left to `perform`, which asks for it, or for others, and replies."""
    reply: Tensor | None = None
    while True:
        try:
            op = program.send(reply)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as end:
            result: Result = end.value
            return result
        reply = yield from perform(op)


def run_program(program: Program[Result], perform: Callable[[Any], Tensor]) -> Result:
    """Runs `program` to its end; `perform` replies to each op at once."""

    def at_once(op: Any) -> Program[Tensor]:
        yield from ()
        return perform(op)

    try:
        next(by_way_of(program, at_once))
    except StopIteration as end:
        result: Result = end.value
    return result


# Indices in the host's memory: numpy there, torch on the device, so that a synchronisation shows.
Host: TypeAlias = NDArray[np.int64]


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Returns a tensor's elements for numpy. On an accelerator the host waits here for all that was
    queued."""
    array: NDArray[Any] = tensor.cpu().numpy()
    return array


def to_device(values: NDArray[Any] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies numbers of the host. They go to an accelerator through pinned memory, so that the host goes
    on."""
    host = torch.as_tensor(values, dtype=dtype, device="cpu")
    if device.type == "cpu" or not can_pin():
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


@cache
def can_pin() -> bool:
    try:
        torch.empty(1, dtype=torch.uint8, device="cpu", pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


class _Computed(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def numel(self) -> int: ...


class Vector(_Computed, Protocol):
    """A vector has elements that are computed when they are read."""

    def between(self, start: int, stop: int) -> Tensor:
        """Computes elements into memory that is the caller's until the next call."""
        ...

    def select(
        self, start: int, stop: int, threshold: float, capacity: int, phase: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Does what `kernels.select` does to elements from `start` to `stop`; indices are relative to
        `start`."""
        ...

    def at(self, host: Host, indices: Tensor) -> Tensor:
        """Computes the values at sorted indices, given on the host and on the device."""
        ...


class Stream(_Computed, Protocol):
    """A stream has values that are computed when they are read, from the first one to the last."""

    def pieces(self) -> Iterator[Tensor]:
        """Yields the values end to end; each piece is the caller's until the next one is asked for."""
        ...

    def bounds(self) -> Tensor:
        """Returns values, few where that is possible: where these are finite, all are."""
        ...


def gathered(source: Tensor | Stream, buffer: Tensor | None = None) -> Tensor:
    """Returns all values in memory: in `buffer`, if there is one and they have to be computed."""
    if isinstance(source, Tensor):
        return source
    if buffer is None:
        buffer = torch.empty(source.numel(), dtype=source.dtype, device=source.device)
    start = 0
    for piece in source.pieces():
        buffer[start : start + piece.numel()] = piece
        start += piece.numel()
    return buffer


@dataclass(frozen=True, slots=True)
class Sparse:
    """Some elements of a vector of `numel`; all others are zero.

    `indices` are sorted and unique. `None` stands for a run of elements from `start` on: a dense vector, or a
    stretch of one, needs no index.
    """

    indices: Tensor | None
    source: Tensor | Stream  # the values, or what computes them
    numel: int
    host: Host | None = None  # the indices once more, if they were on the host before they were on the device
    start: int = 0  # of a run

    @classmethod
    def full(cls, values: Tensor) -> Sparse:
        return cls(None, values, values.numel())

    @classmethod
    def run(cls, start: int, values: Tensor | Stream, numel: int) -> Sparse:
        return cls(None, values, numel, start=start)

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def count(self) -> int:
        return self.source.numel()

    @property
    def values(self) -> Tensor:
        """Computes the values each time, where they come from a stream."""
        return gathered(self.source)

    def pieces(self) -> Iterator[Tensor]:
        return iter((self.source,)) if isinstance(self.source, Tensor) else self.source.pieces()

    def parts(self) -> Iterator[Sparse]:
        """Yields the same elements piece by piece, each with its place."""
        start = self.start
        for piece in self.pieces():
            yield replace(self, source=piece, start=start)
            start += piece.numel()

    def bounds(self) -> Tensor:
        return self.source if isinstance(self.source, Tensor) else self.source.bounds()

    def on_host(self) -> Host:
        """Returns the indices where the host can read them."""
        assert self.indices is not None
        return to_host(self.indices) if self.host is None else self.host

    def listed(self) -> Tensor:
        """Returns the indices, also those of a run."""
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
        """Returns what picks these elements out of a whole vector."""
        return slice(self.start, self.stop) if self.indices is None else self.indices

    def subtract_from(self, vector: Tensor) -> None:
        """Subtracts these elements from the vector, and touches no others."""
        for part in self.parts():
            vector[part.where] -= part.values


@dataclass(frozen=True, slots=True)
class Outcome(Generic[State]):
    """What one step gives. Nothing is mutated before it is committed."""

    update: Sparse  # the sum of what all ranks spent, identical on every rank
    spent: Sparse  # this rank's contribution to `update`; the rest of `acc` stays in its residual
    state: State  # of the scheme, for the next step


@dataclass(frozen=True, slots=True)
class Ctx:
    rank: int
    world: int
    step: int


def target_count(density: float, n: int) -> int:
    """Returns k = floor(density * n), at least 1 of a non-empty vector.

    The shortest decimal of `density` is what the user wrote; exact integer arithmetic on it gives 29 for 0.29
    of 100, where the product of two floats gives 28.
    """
    return min(n, max(1, int(Decimal(repr(density)) * n)))


def is_number(value: object) -> bool:
    """Say whether a value is a number, NumPy's included; bool and str do not count."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_density(density: float) -> None:
    if not is_number(density):
        raise ConfigError(f"density={density!r} is a {type(density).__name__}: give a number, density=0.001")
    if not 0.0 < density <= 1.0:
        raise ConfigError(
            f"density must be above 0 and at most 1, not {density!r} (0.001 sends 0.1 % a step)"
        )
