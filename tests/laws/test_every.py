"""`every=H`: the laws of steps hold in every step of a period, not only where something is exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsieve.errors import ConfigError, MismatchError
from gradsieve.pipeline import Pending, make_pipeline
from gradsieve.pipeline.exchange_settings import Steps
from gradsieve.testing.laws import same_bits
from laws.cases import registered
from laws.treated import (
    SMALL,
    Case,
    Stepping,
    cases,
    check_one_model,
    check_shared,
    check_steps_conserved,
    shared_of,
)

LATE = [(2, 2), (3, 2), (4, 4)]
few = settings(max_examples=settings.default.max_examples // 3)
SCHEMES = [name for name in registered() if name in ("dense", "topk", "exdyna", "spardl", "stripes")]


class Periods(Stepping):
    def advance(self, step: int, idle: Any = ()) -> bool:
        """Whether it exchanged."""
        for rank in range(self.world):
            if rank not in idle:
                self.move(rank, self.case.numbers(step, rank))
        due = {pipeline.begins_exchange() for pipeline in self.pipelines}
        assert len(due) == 1, "ranks are at different places of their periods"
        if True in due:
            self.exchange()
        return True in due


class Lasting(Periods):
    """Exchanges that last for several steps. `at_once`: they are carried when they begin; else only just
    before they are taken over, after optimizers wrote what they read."""

    def __init__(self, case: Case, scheme: Any, settings: Steps, at_once: bool) -> None:
        super().__init__(case, scheme, settings, 1.0)
        self.at_once, self.begun = at_once, list[Pending]()

    def advance(self, step: int, idle: Any = ()) -> bool:
        """Whether an exchange was taken over."""
        if self.pipelines[0].since == self.every - 1:
            for pipeline in self.pipelines:
                pipeline.begins_exchange()
            self.begun = self.begin()
            if self.at_once:
                self.carry(self.begun)
        else:
            for pipeline in self.pipelines:
                pipeline.begins_exchange()
        ripe = bool(self.begun) and self.pipelines[0].is_exchange_due
        if ripe:
            if not self.at_once:
                self.carry(self.begun)
            for pipeline, pending in zip(self.pipelines, self.begun, strict=True):
                pipeline.finish(pending)
            self.begun = []
        for rank in range(self.world):
            self.move(rank, self.case.numbers(step, rank))
        return ripe

    @property
    def every(self) -> int:
        return self.pipelines[0].settings.every


def check_lasting(case: Case, scheme: str, every: int, late: int) -> None:
    settings = Steps(small=SMALL, every=every, overlap=late)
    at_once, at_last = (Lasting(case, scheme, settings, when) for when in (True, False))
    taken = []
    for step in range(3 * every):
        at_once.advance(step)
        if at_last.advance(step):
            taken.append(step)
        check_shared(at_last)
        check_steps_conserved(at_last, case.exact)
        assert same_bits(shared_of(at_last.pipelines[0]), shared_of(at_once.pipelines[0])), (
            "an exchange read what was written after it began"
        )
    assert taken == [
        begun + late - 1 for begun in range(every - 1, 3 * every, every) if begun + late <= 3 * every
    ]


@pytest.mark.parametrize("scheme", ["dense", "topk", "stripes"])
@few
@given(case=cases(worlds=[1, 2, 4]), every_and_late=st.sampled_from(LATE))
def test_an_exchange_that_lasts_reads_what_was_there_when_it_began(
    scheme: str, case: Case, every_and_late: tuple[int, int]
) -> None:
    check_lasting(case, scheme, *every_and_late)


@pytest.mark.parametrize(("every", "late"), [(1, 2), (4, 5), (4, -1)])
def test_an_exchange_is_over_before_the_next_one_begins(every: int, late: int) -> None:
    with pytest.raises(ConfigError, match=f"overlap={late} with every={every}"):
        Steps(every=every, overlap=late)


def every_so_many(every: int, preview: float = 1.0) -> tuple[Steps, float]:
    return Steps(small=SMALL, every=every), preview


def check_period(case: Case, scheme: str, every: int, preview: float | None, flush_after: int) -> None:
    ranks = Periods(case, scheme, Steps(small=SMALL, every=every), preview)
    exact = case.exact and preview is not None
    for step in range(2 * every + 1):
        before = [part.clone() for part in shared_of(ranks.pipelines[0])]
        exchanged = ranks.advance(step)
        assert exchanged == (step % every == every - 1)
        if not exchanged:
            assert same_bits(shared_of(ranks.pipelines[0]), before), (
                "the shared model moved without an exchange"
            )
        check_shared(ranks)
        check_steps_conserved(ranks, exact)
        if step == flush_after:
            ranks.exchange(everything=True)
            check_steps_conserved(ranks, exact)
            check_one_model(ranks)


@pytest.mark.parametrize("scheme", SCHEMES)
@few
@given(
    case=cases(worlds=[1, 2, 3, 4]),
    every=st.integers(1, 4),
    preview=st.sampled_from([1.0, 0.5, None]),
    flush_after=st.integers(0, 8),
)
def test_nothing_is_lost_in_any_step_of_a_period(
    scheme: str, case: Case, every: int, preview: float | None, flush_after: int
) -> None:
    check_period(case, scheme, every, preview, flush_after)


def test_a_dense_exchange_every_so_many_steps_is_the_mean_of_the_models() -> None:
    case = Case(world=4)
    ranks = Periods(case, "dense", *every_so_many(3))
    alone = [{name: p.clone() for name, p in own.items()} for own in ranks.flat]
    for step in range(3):
        for rank, own in enumerate(alone):
            for name, parameter in own.items():
                parameter -= case.numbers(step, rank)[name]
        ranks.advance(step)
    for name, found in ranks.flat[2].items():
        assert torch.equal(found, sum(own[name] for own in alone) / 4)


def test_ranks_at_different_places_of_their_periods_are_told() -> None:
    ranks = Periods(Case(world=3), "topk", *every_so_many(4))
    ranks.advance(0)
    ranks.pipelines[2].since += 1
    with pytest.raises(MismatchError, match="since exchange 0: rank 2 2, the other ranks 1"):
        ranks.exchange(everything=True)


@pytest.mark.parametrize(("every", "kind"), [(1, False), (2, True)])
def test_a_lossless_scheme_exchanges_steps_only_where_there_are_periods(every: int, kind: bool) -> None:
    model = {name: torch.nn.Parameter(part) for name, part in Case().model().items()}
    optimizer = torch.optim.SGD(model.values(), lr=0.1)
    from gradsieve.schemes import make

    made = make_pipeline(model, [optimizer], make("dense"), Steps(every=every), 0, 2)
    assert made.exchanges_steps is kind
