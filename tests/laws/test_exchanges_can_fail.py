"""Each check of `treated.py` is red on a part that breaks its law, and green on the honest one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gradsieve.models import Models
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


class KeepsWhatItSpent(Models):
    def apply(self, index: int, update: Sparse, spent: Sparse, world: int) -> None:
        super().apply(index, update, replace(spent, source=torch.zeros_like(spent.values)), world)


class ForgetsToWrite(Models):
    def rebase(self, *_: Any) -> None:
        self._due = [[] for _ in self.units]


class SharesItsOwn(Models):
    def apply(self, index: int, *others: Any) -> None:
        super().apply(index, *others)
        self.shared[index] += self.own[self.units[index].slots[0].name].sum()


def exactly(ranks: Stepping) -> None:
    check_steps_conserved(ranks, exact=True)


@pytest.mark.parametrize(
    ("broken", "check", "said"),
    [
        (KeepsWhatItSpent, exactly, "lost or made up"),
        (SharesItsOwn, check_shared, "shares another model"),
        (ForgetsToWrite, check_one_model, "another model"),
    ],
)
def test_a_broken_memory_of_steps_is_flagged(
    broken: type[Models], check: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> Stepping:
        ranks = Stepping(CASE, "topk", *STEPS["whole"])
        for step in range(2):
            ranks.advance(step)
        ranks.exchange(everything=True)
        return ranks

    check(trained())
    monkeypatch.setattr("laws.treated.Models", broken)
    with pytest.raises(AssertionError, match=said):
        check(trained())
