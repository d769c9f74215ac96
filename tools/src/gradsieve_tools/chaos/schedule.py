"""Which faults happen, where and when: data, the same for the same seed, number and kinds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from gradsieve_tools.chaos.kinds import DEATHS, KINDS, STOP, Must

WORLD = 3
STEPS = 4  # steps of an episode, from one fault to the next
MIDDLE = 2  # steps before an episode's first save; it saves at its end as well
SCHEMES = ("stripes", "exdyna", "oktopk", "spardl")
DEADLINE_OF_DEATHS = 60.0  # seconds: a death has to be noticed long before
DEADLINE = 2.5
_LATEST = 0.02


@dataclass(frozen=True, slots=True)
class Chance:
    number: int
    scheme: str
    kind: str
    rank: int
    step: int  # step of its episode; -1: loading
    op: int  # op of that step, or the first after it that suits the kind
    delay: float  # seconds from the op on; 0: at the op
    bit: int

    @property
    def must(self) -> Must:
        return KINDS[self.kind].must

    @property
    def deadline(self) -> float:
        return DEADLINE_OF_DEATHS if self.must in (Must.DEATH, Must.FAIL) else DEADLINE

    @property
    def allowed(self) -> float:
        """Seconds until all others know."""
        return 6.0 if self.must in (Must.DEATH, Must.FAIL) else self.deadline + 1.0


def schedule(seed: int, faults: int, kinds: Sequence[str]) -> list[Chance]:
    """Draw kinds equally often in random order; a longer schedule begins with the shorter one."""
    chance, out = random.Random(seed), list[Chance]()
    while len(out) < faults:
        for name in chance.sample([*kinds], len(kinds)):
            kind = KINDS[name]
            out.append(
                Chance(
                    number=len(out),
                    scheme=chance.choice(SCHEMES),
                    kind=name,
                    rank=chance.randrange(WORLD) if kind.rank is None else kind.rank,
                    step=chance.randint(kind.first_step, kind.last_step),
                    op=chance.randint(0, kind.last_op),
                    delay=chance.uniform(0.0, _LATEST) if chance.random() < 0.3 and kind.any_time else 0.0,
                    bit=chance.getrandbits(30),
                )
            )
    return out[:faults]


def matrix(ops: Mapping[str, int]) -> list[Chance]:
    """Return every death and a stop of every rank before every op of a step, given their number by scheme."""
    kinds = [*DEATHS, STOP]
    places = [
        (scheme, op, kind, rank)
        for scheme, count in ops.items()
        for op, kind, rank in product(range(count), kinds, range(WORLD))
    ]
    return [
        Chance(number, scheme, kind, rank, step=1, op=op, delay=0.0, bit=0)
        for number, (scheme, op, kind, rank) in enumerate(places)
    ]
