"""The calls of one exchange: the schemes' own generators, at the real number of ranks, on a smaller vector.

A thousand ranks with a unit of 26 million parameters do not fit into a machine. What decides the length of
a message is k and P, so the vector is cut down and the selection is not, as far as that holds:

    partitioned     schemes that read a part of the vector (ExDyna, MiCRO, stripes): at the true density
    building up     schemes whose update grows with P (top-k): at the true density, as the union depends on it
    others          as many elements as there really are, of a shorter vector (Ok-Topk, SparDL)

Where k is still too large, two recordings are made, one half as large. Every call's bytes are a + b k, and
are taken at the true k; how much ranks differ is that of the recording. Tests compare this with recordings
at the true size.

Gradients have heavy tails and are independent between ranks, which all read one pool at different places:
of the values only how many are large matters here. Nothing is fed back, and nothing lies askew in the vector.
So partitions are balanced and unions are as large as they can be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradsieve.schemes import Ctx, Op, Program, Scheme, by_way_of
from gradsieve.testing import lockstep
from gradsieve_tools.simulate.messages import Call, call_of

STEPS = 2  # steps of a scheme with state; the last one is recorded
_APART = 61  # places between two ranks' gradients in the pool
_TENSORS = 64  # in a unit, for schemes that look at them (DEFT)
# Elements of all ranks together that are looked at, sent with values, and sent as signs
_SCANNED, _PICKED, _READ = 2**27, 2**25, 2**29
_BLOCKS = 3 * 256  # A third of a vector of so many times P elements is whole blocks of codes for all owners
_CPU = torch.device("cpu")

Heard = Callable[[float], None]  # called with the finished part of a rank's step


@dataclass(frozen=True, slots=True)
class Size:
    n: int
    k: int

    def halved(self) -> Size:
        return Size(max(1, self.n // 2), max(1, self.k // 2))


@dataclass(frozen=True, slots=True)
class Recorded:
    calls: list[Call]
    size: Size
    scaled: bool  # false: the messages are those of the generators as they are


def recorded(scheme: Scheme[Any], n: int, world: int, heard: Heard = lambda part: None) -> Recorded:
    """The calls of a unit of n elements."""
    true, size = Size(n, scheme.k(n)), affordable(scheme, n, world)
    calls = _calls(scheme, size, world, heard)
    if size.k == true.k:
        return Recorded(calls, size, scaled=False)
    half = size.halved()
    # What is sent round robin is values in whole blocks, and nothing else.
    small = [] if scheme.round_robin else _calls(scheme, half, world, heard)
    return Recorded(_scaled(small, calls, half, size, true), size, scaled=True)


def steps_of(scheme: Scheme[Any]) -> int:
    """Return how many steps are run: what is sent round robin is as long in the first step as in any."""
    return STEPS if scheme.remembers and not scheme.round_robin else 1


def rank_steps(scheme: Scheme[Any], n: int, world: int) -> int:
    recordings = 1 if scheme.round_robin or affordable(scheme, n, world).k == scheme.k(n) else 2
    return recordings * steps_of(scheme) * world


def affordable(scheme: Scheme[Any], n: int, world: int) -> Size:
    """The size at which the generators run."""
    k = scheme.k(n)
    if scheme.no_comm or scheme.lossless or scheme.is_whole:
        return Size(*[max(1, min(n, _PICKED // world))] * 2)
    if scheme.reads_parts:
        exact = getattr(scheme, "values", "exact") == "exact"
        most = max(1, (_PICKED * 2 if exact else _READ) // world)
        return Size(n, k) if k <= most else _thinner(scheme, n * most // k, world)
    if builds_up(scheme):
        most = max(1, min(_SCANNED // world, n * _PICKED // (world * k)))
        return Size(n, k) if n <= most else _thinner(scheme, most, world)
    shorter = min(n, max(64, _SCANNED // world))
    return Size(shorter, max(1, min(k, _PICKED // world, shorter // 4)))


def _thinner(scheme: Scheme[Any], n: int, world: int) -> Size:
    n = max(n - n % (_BLOCKS * world), min(n, _BLOCKS * world))
    return Size(n, scheme.k(n))


def effort(scheme: Scheme[Any]) -> float:
    if scheme.lossless or scheme.no_comm:
        return 0.1
    return 1.0 if builds_up(scheme) or (scheme.reads_parts and not scheme.round_robin) else 4.0


@functools.cache
def builds_up(scheme: Scheme[Any]) -> bool:
    """Return whether an update has more elements where there are more ranks."""
    few = Size(2**14, 2**8)
    teams = getattr(scheme, "teams", 1)
    return _Ranks(scheme, few, 4 * teams if isinstance(teams, int) else 4).count > 1.5 * few.k


class _Ranks:
    """P virtual ranks that have taken a few steps; the calls of the last one."""

    def __init__(self, scheme: Scheme[Any], size: Size, world: int, heard: Heard = lambda part: None) -> None:
        self.scheme, self.size, self.world, self.heard = _with_k(scheme, size), size, world, heard
        random = torch.Generator().manual_seed(0)
        length = size.n + _APART * (world + STEPS)
        # The third power of normal numbers: a few large ones, as gradients have.
        self.pool = torch.randn(length, dtype=torch.float32, device=_CPU, generator=random).pow_(3)
        sizes = [
            part.numel() for part in torch.empty(size.n, device="meta", dtype=torch.int8).chunk(_TENSORS)
        ]
        self.states = [self.scheme.init_state(sizes, world) for _ in range(world)]
        self.count = 0
        self.calls: list[Call] = []
        for step in range(steps_of(scheme)):
            self.calls = []
            counts = lockstep.run([self._step(rank, step) for rank in range(world)], observe=self._note)
            self.count = counts[0]

    def _note(self, ops: Sequence[Op]) -> None:
        self.calls.append(call_of(ops))

    def _step(self, rank: int, step: int) -> Program[int]:
        place = _APART * (rank + step)
        acc = self.pool[place : place + self.size.n]
        program = self.scheme.exchange(acc, self.states[rank], Ctx(rank, self.world, step))
        left = 1.0

        def perform(op: Op) -> Program[Tensor]:
            nonlocal left
            left /= 2  # the number of ops is unknown, and the first work is the most
            self.heard(left)
            return (yield op)

        outcome = yield from by_way_of(program, perform)
        self.heard(left)
        self.states[rank] = self.scheme.next_states([outcome.state])[0]
        return outcome.update.count


def _calls(scheme: Scheme[Any], size: Size, world: int, heard: Heard) -> list[Call]:
    return _Ranks(scheme, size, world, heard).calls


def _with_k(scheme: Scheme[Any], size: Size) -> Scheme[Any]:
    """The scheme that sends so many of so many."""
    if scheme.lossless or scheme.k(size.n) == size.k:
        return scheme
    return replace(scheme, density=size.k / size.n)


def _scaled(small: list[Call], large: list[Call], half: Size, size: Size, true: Size) -> list[Call]:
    """The calls at the true size: what grows with k grows on, what does not stays."""
    alike = [call.kind for call in small] == [call.kind for call in large]
    grown = []
    for number, call in enumerate(large):
        # Without another recording, or with one that went another way, all that is sent grows.
        before = small[number].mean if alike else call.mean * half.k / size.k
        slope = (call.mean - before) / max(1, size.k - half.k)
        bytes_at_true = max(0.0, call.mean + slope * (true.k - size.k))
        grown.append(call.scaled(bytes_at_true / call.mean) if call.mean else call)
    return grown
