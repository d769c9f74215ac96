"""A published scheme and a straight program of its paper's method, side by side on the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from gradsieve.schemes.base import Scheme
from gradsieve.schemes.papers.oktopk import OkTopkPaper
from gradsieve.schemes.papers.spardl import SparDLPaper
from gradsieve.testing.ranks import Round, VirtualRanks
from papers.gradients import STEPS, Gradients
from papers.pseudocode_oktopk import oktopk
from papers.pseudocode_spardl import spardl

Step = dict[str, Any]


@dataclass(frozen=True)
class Paper:
    scheme: Scheme[Any]
    gradients: Gradients
    pseudocode: Callable[[Gradients, Scheme[Any]], list[Step]]
    seen: Callable[[Round], Step]
    """Of the scheme's step, what the pseudo-code's says as well."""

    def with_settings(self, **settings: Any) -> Paper:
        return replace(self, scheme=replace(self.scheme, **settings))

    def steps(self) -> Iterator[Step]:
        """What the scheme does."""
        n, world = self.gradients.n, self.gradients.world
        fleet = VirtualRanks(self.scheme, [n], world, torch.float64)
        fleet.states = [[self.scheme.init_state([n], world)] for _ in range(world)]
        for round_ in fleet.advance(lambda t, r, _: torch.from_numpy(self.gradients(t, r)), STEPS):
            update = round_.outcomes[0].update
            assert update.indices is None or not update.indices.diff().le(0).any()
            yield {"indices": update.listed()[update.values != 0].tolist(), **self.seen(round_)}


def of_oktopk(round_: Round) -> Step:
    state = round_.outcomes[0].state
    return {
        "threshold": state.global_threshold,
        "local": [outcome.state.local_threshold for outcome in round_.outcomes],
        "cuts": state.cuts.tolist(),
        "counts": [outcome.spent.count for outcome in round_.outcomes],
    }


def of_spardl(round_: Round) -> Step:
    update = round_.outcomes[0].update
    return {
        "values": update.values[update.values != 0].tolist(),
        "h": [outcome.state.kept for outcome in round_.outcomes],
    }


def spardl_of(gradients: Gradients, scheme: Scheme[Any]) -> list[Step]:
    assert isinstance(scheme, SparDLPaper)
    assert isinstance(scheme.teams, int)
    return spardl(gradients, scheme.density, scheme.teams, scheme.across)


PAPERS = {
    "oktopk": Paper(
        OkTopkPaper(density=0.02),
        Gradients(4001, 4, hot=40),
        lambda gradients, scheme: oktopk(gradients, scheme.k(gradients.n)),
        of_oktopk,
    ),
    "spardl": Paper(SparDLPaper(density=0.03), Gradients(1001, 5), spardl_of, of_spardl),
    "spardl, b-sag": Paper(SparDLPaper(density=0.3, teams=2), Gradients(1401, 4), spardl_of, of_spardl),
    "spardl, r-sag": Paper(
        SparDLPaper(density=0.03, teams=4, across="r-sag"), Gradients(1001, 4), spardl_of, of_spardl
    ),
}


@cache
def published(name: str) -> list[Step]:
    """What the pseudo-code does."""
    paper = PAPERS[name]
    return paper.pseudocode(paper.gradients, paper.scheme)


def check_same(name: str, paper: Paper) -> None:
    """Every step of the scheme is that of the pseudo-code."""
    wanted = published(name)
    for step, (ours, theirs) in enumerate(zip(paper.steps(), wanted, strict=True)):
        for what, figures in ours.items():
            wanted_figures = theirs[what]
            if what in ("threshold", "local"):
                wanted_figures = pytest.approx(wanted_figures, rel=1e-9)
            assert figures == wanted_figures, f"step {step}: another {what}"
