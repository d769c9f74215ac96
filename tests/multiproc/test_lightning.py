"""Lightning steps by closure, clips inside it, accumulates without a step and leaves modes behind: a training
by its Trainer is the training by hand."""

from __future__ import annotations

from typing import Any

import pytest

from multiproc.frameworks import ends

pytestmark = pytest.mark.nightly  # as most of test_frameworks.py


def trained(way: str) -> list[dict[str, Any]]:
    """How each rank ended."""
    return ends()[0][f"lightning {way}"]


def test_both_ranks_end_with_the_same_bits() -> None:
    first, second = trained("trainer")
    assert first["bits"] == second["bits"]


def test_it_is_the_loop_by_hand() -> None:
    trainer, hand = trained("trainer"), trained("hand")
    assert trainer[0]["loss"] == pytest.approx(hand[0]["loss"], rel=0.02)
    assert [end["exchanges"] for end in trainer + hand] == [41] * 4  # with the flush at the end
    assert trainer[0]["evaluated"] == pytest.approx(hand[0]["evaluated"], rel=0.02)


def test_both_ranks_evaluate_the_same_model() -> None:
    first, second = trained("trainer")
    assert first["evaluated"] == second["evaluated"]
    assert len(first["evaluated"]) == 8 * 4


def test_a_gradient_that_is_not_finite_costs_one_step_of_one_rank() -> None:
    ended = trained("nan")
    assert [end["skipped"] for end in ended] == [0, 1]
    assert all(end["finite"] for end in ended)
    assert ended[0]["bits"] == ended[1]["bits"]
    assert ended[0]["bits"] != trained("trainer")[0]["bits"], "the twin: the spoiled batch was there"
