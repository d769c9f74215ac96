"""Each check of `treated.py` is red on a part that breaks its law, and green on the honest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsieve.feedback.local_steps import LocalSteps
from gradsieve.types import Sparse
from laws.treated import (
    STEPS,
    Case,
    Stepping,
    check_one_model,
    check_shared,
    check_steps_conserved,
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
        ranks = Stepping(CASE, "topk", *STEPS["whole"])
        for step in range(2):
            ranks.advance(step)
        ranks.exchange(everything=True)
        return ranks

    check(trained())
    monkeypatch.setattr("gradsieve.pipeline.steps.LocalSteps", broken)
    with pytest.raises(AssertionError, match=said):
        check(trained())
