"""Multi-process tests around the schemes use a few of them: these must talk in every way that any does."""

from __future__ import annotations

from torch import Tensor

from gradsieve.comm import lockstep
from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Op
from gradsieve.schemes import SCHEMES, make
from gradsieve.testing.gradients import Source
from gradsieve.types import Ctx, Program, by_way_of
from multiproc.training import TYPICAL

N, WORLD = 500, 4


def ways(name: str) -> set[type]:
    """Kinds of ops that a scheme issues in its first step."""
    used: set[type] = set()

    def perform(op: Op) -> Program[Tensor]:
        used.add(type(op))
        return (yield op)

    scheme, source = make(name, 0.1), Source("normal", (N,))
    programs = [
        scheme.exchange(source(0, rank, 0), scheme.begin(N, WORLD), Ctx(rank, WORLD, 0))
        for rank in range(WORLD)
    ]
    lockstep.run([by_way_of(program, perform) for program in programs])
    return used


def test_typical_schemes_talk_in_every_way_that_any_scheme_does() -> None:
    by_all = {frozenset(ways(name)) for name, kind in SCHEMES.items() if not kind.no_comm}
    typical = {frozenset(ways(name)) for name in TYPICAL}
    together = {used: frozenset().union(*(known for known in typical if known <= used)) for used in by_all}
    assert [used for used, known in together.items() if used != known] == []
    assert typical <= by_all
    assert set().union(*typical) == {AllGather, AllReduce, AllToAll, Broadcast, Exchange}
