"""One rank lies: its program is the honest one, what it sends is altered on the way out.

It sees its own lie in the reply, as its peers do. Where it chokes on it, it falls silent and leaves the word
to the honest ranks, so that an error that comes out of `attack` was raised by one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.ops import AllReduce, AllToAll
from gradsieve.schemes import make
from gradsieve.schemes.base import Scheme
from gradsieve.testing.gradients import Source
from gradsieve.testing.laws import same_bits
from gradsieve.testing.ranks import VirtualRanks
from gradsieve.types import Ctx, Outcome, Program

N, WORLD, EVIL, DENSITY = 240, 3, 1, 0.2
COUNTS_FIRST = ["hard-threshold", "gaussiank", "sidco", "dgc", "exdyna-paper"]
"""Schemes whose first message says how long a rank's second one would be."""

Forgery = Callable[[int, Tensor], Tensor]
"""From the number of the message in this step and the honest message, the message to send instead."""


@dataclass(frozen=True)
class Target:
    """A group in the middle of training, about to be lied to."""

    scheme: Scheme[Any]
    accs: list[Tensor]
    states: list[Any]
    step: int
    evil: int = EVIL

    def attack(self, forge: Forgery) -> list[Outcome[Any]]:
        """One step with rank `evil` lying; the honest ranks' outcomes, or what they raised."""
        before = deepcopy((self.accs, self.states))
        programs = [
            self.scheme.exchange(acc, state, Ctx(rank, WORLD, self.step))
            for rank, (acc, state) in enumerate(zip(self.accs, self.states, strict=True))
        ]
        programs[self.evil] = lying(programs[self.evil], forge, self.evil)
        try:
            outcomes = lockstep.run(programs)
        finally:
            assert same_bits((self.accs, self.states), before), "something was applied before the check"
        return [outcome for rank, outcome in enumerate(outcomes) if rank != self.evil]


def lying(program: Program[Any], forge: Forgery, rank: int = EVIL) -> Program[Any]:
    reply: Any = None
    turn = 0
    while True:
        try:
            op = program.send(reply)
        except StopIteration as end:
            return end.value
        except Exception:  # the liar's own trouble
            return None
        if not isinstance(op, AllReduce):  # which holds values only
            honest, op = op, replace(op, tensor=forge(turn, op.tensor.clone()))
            if isinstance(op, AllToAll):  # what it keeps for itself reaches nobody: no use lying there
                start = sum(op.send_counts[:rank])
                own = slice(start, start + op.send_counts[rank])
                op.tensor[own] = honest.tensor[own]
            turn += 1
        reply = yield op


def target(name: str, steps: int) -> Target:
    """After that many honest steps. None: schemes with a threshold look for one; four: they track it."""
    source = Source("normal", (N,), seed=7)
    fleet = VirtualRanks(make(name, DENSITY), [N], WORLD)
    for _ in fleet.advance(source, steps):
        pass
    accs = [fleet.residuals[rank][0] + source(steps, rank, 0) for rank in range(WORLD)]
    evil = steps % WORLD if name == "cltk" else EVIL  # only its leader is listened to
    return Target(fleet.scheme, accs, [states[0] for states in fleet.states], steps, evil)


def same_message(turn: int, message: Tensor) -> Tensor:
    """The forgery that forges nothing."""
    return message


def bits_of(value: float) -> int:
    return int(torch.tensor(value).view(torch.int32))
