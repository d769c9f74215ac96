"""Spans of stages: nothing is counted twice, and timing costs next to nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from gradsieve_tools.bench.overhead import Case, Rank, step


@torch.no_grad()
def test_no_span_of_a_step_lies_inside_another() -> None:
    """Nothing is counted twice: `seconds` adds spans up."""
    ranks = [Rank(Case("exdyna", "steps", 1, 2048**2, 0.001), 0)]
    ranks[0].train(torch.randn(2 * ranks[0].gradients[0].numel()))
    step(ranks)
    spans = sorted(ranks[0].pipeline.stats.timeline.spans, key=lambda span: span.start)
    assert {span.name for span in spans} == {"accumulate", "select", "exchange", "apply", "commit"}
    assert all(one.stop <= other.start for one, other in pairwise(spans))


@torch.no_grad()
@pytest.mark.parametrize("elements", [2048**2, 3 * 2048**2])
def test_a_step_has_some_tens_of_spans_however_many_elements_there_are(elements: int) -> None:
    """A span costs microseconds and such a step tens of milliseconds: timing is less than a hundredth."""
    ranks = [Rank(Case("exdyna", "steps", 2, elements, 0.001), rank) for rank in range(2)]
    noise = torch.randn(2 * ranks[0].gradients[0].numel())
    for _ in range(4):
        for rank in ranks:
            rank.train(noise)
        step(ranks)
        assert all(5 <= len(rank.pipeline.stats.timeline.spans) <= 40 for rank in ranks)
    assert len(ranks[0].pipeline.units) == 1
