"""Each check of `treated.py` is red on a part that breaks its law, and green on the honest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsieve.feedback.estimate import Estimate
from gradsieve.feedback.local_steps import LocalSteps
from gradsieve.feedback.velocity import Velocity
from gradsieve.types import Sparse
from laws.treated import (
    GRADIENTS,
    STEPS,
    Case,
    Receiving,
    Stepping,
    check_by_rate,
    check_estimates,
    check_models,
    check_one_model,
    check_released,
    check_shared,
    check_steps_conserved,
    check_untouched,
    check_velocities,
)

CASE = Case(world=4, density=0.3)


class KeepsWhatItSpent(LocalSteps):
    def apply(self, update: Sparse, spent: Sparse, *others: Any) -> None:
        super().apply(update, replace(spent, source=torch.zeros_like(spent.values)), *others)


class ForgetsToWrite(LocalSteps):
    def apply(self, update: Sparse, spent: Sparse, dense: Any, parameters: Any, *others: Any) -> None:
        super().apply(update, spent, dense, _copied(parameters), *others)

    def rebase(self, parameters: Mapping[str, Tensor], *others: Any) -> None:
        super().rebase(_copied(parameters), *others)


def _copied(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.clone() for name, parameter in parameters.items()}


class SharesItsOwn(LocalSteps):
    def apply(self, *others: Any) -> None:
        super().apply(*others)
        self.shared += others[3][self.unit.sparse[0].name].sum()


def exactly(ranks: Stepping) -> None:
    check_steps_conserved(ranks, exact=True)


def models(ranks: Stepping) -> None:
    check_models(ranks, exact=True)


@pytest.mark.parametrize(
    ("broken", "check", "said"),
    [
        (KeepsWhatItSpent, exactly, "lost or made up"),
        (SharesItsOwn, check_shared, "shares another model"),
        (ForgetsToWrite, check_one_model, "still waiting"),
    ],
)
def test_a_broken_memory_of_steps_is_flagged(
    broken: type[LocalSteps], check: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> Stepping:
        ranks = Stepping(CASE, "topk", STEPS["whole"])
        for step in range(2):
            ranks.advance(step)
        ranks.exchange(everything=True)
        return ranks

    check(trained())
    monkeypatch.setattr("gradsieve.pipeline.steps.LocalSteps", broken)
    with pytest.raises(AssertionError, match=said):
        check(trained())


def test_a_model_that_is_never_folded_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> None:
        ranks = Stepping(CASE, "topk", STEPS["half"])
        for step in range(2):
            ranks.advance(step)
            models(ranks)

    train()
    monkeypatch.setattr(LocalSteps, "_rebase_due", lambda *_: None)
    with pytest.raises(AssertionError, match="from w - preview e"):
        train()


class NeverFades(Velocity):
    """u = u + g."""

    def correct(self, gradients: Mapping[str, Tensor], scale: float, loss_scale: float) -> None:
        self.settings = {name: replace(own, factor=1.0) for name, own in self.settings.items()}
        super().correct(gradients, scale, loss_scale)


class NeverForgets(Velocity):
    def commit(self, sent: Sparse | None) -> None:
        super().commit(None)


@pytest.mark.parametrize(("broken", "treatment"), [(NeverFades, "local"), (NeverForgets, "masked")])
def test_a_broken_velocity_is_flagged(
    broken: type[Velocity], treatment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> None:
        ranks = Receiving(CASE, "topk", GRADIENTS[treatment])
        for step in range(3):
            before = ranks.memories()
            ranks.advance(step)
            check_velocities(ranks, before, [CASE.numbers(step, rank) for rank in range(4)])

    train()
    monkeypatch.setattr("gradsieve.pipeline.gradients.Velocity", broken)
    with pytest.raises(AssertionError, match="another velocity"):
        train()


class MissesAnUpdate(Estimate):
    def commit(self, spent: Sparse, released: Sparse) -> None:
        before = self.total.clone()
        super().commit(spent, released)
        self.total.copy_(before)


def test_a_total_that_misses_an_update_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> None:
        ranks = Receiving(CASE, "topk", GRADIENTS["estimate"])
        ranks.advance(0)
        check_estimates(ranks, exact=True)

    train()
    monkeypatch.setattr("gradsieve.pipeline.gradients.Estimate", MissesAnUpdate)
    with pytest.raises(AssertionError, match="estimates and total differ"):
        train()


def test_a_residual_that_a_schedule_distorts_is_flagged() -> None:
    for treatment, fails in (("by rate", False), ("plain", True)):
        ranks = Receiving(CASE, "topk", GRADIENTS[treatment])
        moved, fed = ({n: torch.zeros(p.numel()).double() for n, p in ranks.model.items()} for _ in range(2))
        for step, rate in enumerate([1.0, 0.5, 0.25]):
            for pipeline in ranks.pipelines:
                pipeline.rate = rate
            means = ranks.advance(step)
            for name in moved:
                moved[name] += rate * 4 * means[0][name].double()
                fed[name] += rate * sum(CASE.numbers(step, rank)[name].double() for rank in range(4))
        if fails:
            with pytest.raises(AssertionError, match="lost or made up"):
                check_by_rate(moved, fed, ranks, room=0.0)
        else:
            check_by_rate(moved, fed, ranks, room=0.0)


def test_another_gradient_on_one_rank_and_a_memory_that_changed_are_flagged() -> None:
    ranks = Receiving(CASE, "topk", GRADIENTS["plain"])
    released = ranks.advance(0)
    check_released(released)
    released[2]["last"][0] += 1
    with pytest.raises(AssertionError, match="rank 2 is given another"):
        check_released(released)
    before = ranks.memories()
    check_untouched(before, ranks.memories())
    ranks.advance(1)
    with pytest.raises(AssertionError, match="skipped step changed"):
        check_untouched(before, ranks.memories())
