"""Whole exchanges: an honest rank runs its scheme's own step, and one reply of it was altered by a peer.

Each scheme trains a little on virtual ranks; what the victim was sent in the step after that is kept. Then
its program runs again and again from there, alone, with these replies, but for one that is altered where a
peer could: its row of a gather, its rows of an all-to-all, all of an exchange or of a sum. Where the lie
changes what the victim asks for next, it is given as much as it asks for: this liar keeps to its own sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradsieve.errors import Malformed
from gradsieve.schemes import (
    SCHEMES,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Ctx,
    Exchange,
    Op,
    Outcome,
    Program,
    Scheme,
    Sparse,
    by_way_of,
)
from gradsieve.testing import lockstep
from gradsieve_tools.fuzz.entry_points.entry_point import REFUSED, EntryPoint, check_rising
from gradsieve_tools.specs import parse

N, WORLD, VICTIM, LIAR, DENSITY = 240, 4, 0, 1, 0.2
STEPS = (0, 5)  # valid steps before the attack
_VARIANTS = (
    *(f"stripes:values={values}" for values in ("exact", "bf16", "int8", "int4", "int2")),
    *("exdyna:values=sign", "micro:values=int8", "randomk:values=int4", "deft:values=bf16"),
    *("topk-union:values=int2", "hard-threshold:values=int8", "cltk:values=sign"),
    *("spardl:teams=2", "spardl:teams=2+across=r-sag", "spardl:teams=auto", "gtopk:paper=true"),
)


@dataclass(frozen=True)
class Heard:
    op: Op
    reply: Tensor


@dataclass(frozen=True)
class Victim:
    scheme: Scheme[Any]
    acc: Tensor
    state: Any
    ctx: Ctx
    heard: list[Heard]

    def step(self, number: int, forged: bytearray) -> Outcome[Any]:
        """Return the same step with the liar's part of reply `number` as forged."""
        program = self.scheme.exchange(self.acc, self.state, self.ctx)
        outcome: Outcome[Any] = replayed(program, self.heard, number, forged)
        return outcome

    def enter(self, number: int) -> Callable[[bytearray], None]:
        def enter(forged: bytearray) -> None:
            outcome = self.step(number, forged)
            check_lawful(outcome.update, self.acc.numel())
            check_lawful(outcome.spent, self.acc.numel())
            state = self.scheme.next_states([outcome.state])[0]
            ctx = Ctx(self.ctx.rank, self.ctx.world, self.ctx.step + 1)
            if forged[0] & 7 == 0:  # what it left behind is something to go on from; replies are old ones
                with contextlib.suppress(*REFUSED):
                    replayed(self.scheme.exchange(self.acc, state, ctx), self.heard)

        return enter


def entries() -> Iterator[EntryPoint]:
    names = [name for name, kind in SCHEMES.items() if not kind.no_comm]
    for text in (*names, *_VARIANTS):
        for steps in STEPS:
            victim = trained(parse(text, None if ":" in text and "stripes" in text else DENSITY), steps)
            yield from _doors_of(f"{text} after {steps} steps", victim)


def _doors_of(name: str, victim: Victim) -> Iterator[EntryPoint]:
    n, k = victim.acc.numel(), victim.scheme.k(victim.acc.numel())
    edges = (n, k, n // WORLD, WORLD, k * WORLD)
    for number, heard in enumerate(victim.heard):
        frame = liars_part(heard)
        if frame is not None and frame.numel():
            kind = type(heard.op).__name__
            others = [liars_part(each) for each in victim.heard]
            honest = (as_bytes(frame), *(as_bytes(part) for part in others if part is not None))
            yield EntryPoint(f"{name}, {kind} {number}", honest, edges, victim.enter(number))


def trained(scheme: Scheme[Any], steps: int) -> Victim:
    """Return a victim after that many valid steps, with the messages of its next step."""
    source = torch.Generator(device="cpu").manual_seed(7)
    residuals = [torch.zeros(N, dtype=torch.float32, device="cpu") for _ in range(WORLD)]
    states = [scheme.begin(N, WORLD) for _ in range(WORLD)]
    for step in range(steps + 1):
        accs = [
            residual + torch.randn(N, generator=source, dtype=torch.float32, device="cpu")
            for residual in residuals
        ]
        ranks = [Ctx(rank, WORLD, step) for rank in range(WORLD)]
        programs = [
            scheme.exchange(acc.clone(), state, ctx)
            for acc, state, ctx in zip(accs, states, ranks, strict=True)
        ]
        heard: list[Heard] = []
        programs[VICTIM] = overheard(programs[VICTIM], heard)
        victim = Victim(scheme, accs[VICTIM].clone(), states[VICTIM], ranks[VICTIM], heard)
        for rank, outcome in enumerate(lockstep.run(programs)):
            outcome.spent.subtract_from(accs[rank])
            residuals[rank] = accs[rank]
            states[rank] = scheme.next_states([outcome.state])[0]
    return victim


def overheard(program: Program[Any], heard: list[Heard]) -> Program[Any]:
    """Return the same program; what it is sent is written down."""

    def perform(op: Op) -> Program[Tensor]:
        reply: Tensor = yield op
        heard.append(Heard(op, reply.clone()))
        return reply

    return by_way_of(program, perform)


def replayed(
    program: Program[Any], heard: list[Heard], number: int = -1, forged: bytearray | None = None
) -> Any:
    """The result of a program that is sent these replies, one of them forged."""
    reply: Any = None
    turn = 0
    while True:
        try:
            op = program.send(reply)
        except StopIteration as end:
            return end.value
        reply = fitting(op, heard[min(turn, len(heard) - 1)].reply)
        if turn == number and forged is not None:
            part = liars_part(Heard(op, reply))
            if part is None or part.nbytes != len(forged):
                raise Malformed("the lie before it changed what is asked for here")
            part.copy_(torch.frombuffer(forged, dtype=part.dtype).view(part.shape))
        turn += 1


def fitting(op: Op, reply: Tensor) -> Tensor:
    """A copy of what was sent, or as much as this op asks for made of it."""
    shape = _shape(op)
    if reply.shape == shape and reply.dtype == op.tensor.dtype:
        out = reply.clone()
    else:
        out = torch.zeros(shape, dtype=op.tensor.dtype, device="cpu")
        flat = reply.flatten()[: out.numel()].to(out.dtype)
        out.view(-1)[: flat.numel()] = flat
    if isinstance(op, AllGather):  # what a rank sends to itself is not altered
        out[VICTIM] = op.tensor
    return out


def _shape(op: Op) -> torch.Size:
    match op:
        case AllGather():
            return torch.Size((WORLD, *op.tensor.shape))
        case AllToAll():
            return torch.Size((sum(op.receive_counts), *op.tensor.shape[1:]))
        case Exchange():
            return torch.Size((op.receive,))
        case AllReduce() | Broadcast():
            return op.tensor.shape


def liars_part(heard: Heard) -> Tensor | None:
    """Return the part of a reply that a peer decides, contiguous; None: the victim decides all."""
    op, reply = heard.op, heard.reply
    match op:
        case AllGather():
            return reply[LIAR]
        case AllToAll():
            start = sum(op.receive_counts[:LIAR])
            return reply[start : start + op.receive_counts[LIAR]]
        case Exchange():
            return None if op.source == VICTIM else reply
        case Broadcast():
            return None if op.root == VICTIM else reply
        case AllReduce():
            return reply


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def check_lawful(sparse: Sparse, n: int) -> None:
    """Sorted, unique, inside 0..n-1, one value each."""
    if sparse.numel != n:
        raise AssertionError(f"speaks of {sparse.numel} elements, not {n}")
    if sparse.indices is None:
        if not 0 <= sparse.start <= sparse.stop <= n:
            raise AssertionError("a run beyond the vector")
        return
    indices = sparse.indices.numpy()
    if indices.dtype != np.int64 or len(indices) != sparse.count:
        raise AssertionError("not one value for each index")
    check_rising(indices, n)
