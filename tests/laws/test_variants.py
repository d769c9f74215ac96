"""The laws for settings that change the messages."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from torch import Tensor

from gradsieve.testing.gradients import Source
from gradsieve.testing.laws import (
    check_drained,
    check_nothing_lost,
    check_round,
    check_same_states,
    rounds_freely,
)
from gradsieve.testing.ranks import VirtualRanks
from laws.cases import Case, cases
from laws.variants import VARIANTS

every_variant = pytest.mark.parametrize("variant", VARIANTS)


@every_variant
@given(case=cases())
def test_every_round_is_lawful(variant: str, case: Case) -> None:
    scheme = VARIANTS[variant](case.density, case.world)
    fleet = VirtualRanks(scheme, case.sizes, case.world, case.dtype)
    for round_ in fleet.advance(case.source, min(case.steps, 6)):
        check_round(round_, case.source.exact and not rounds_freely(scheme))
    check_same_states(fleet.states)


@every_variant
@pytest.mark.parametrize("world", [3, 8])
def test_nothing_is_lost_and_all_is_sent_in_the_end(variant: str, world: int) -> None:
    n = 60
    fleet = VirtualRanks(VARIANTS[variant](0.1, world), [n], world)
    source = Source("integers", (n,), seed=world)
    gradients, updates = torch.zeros(n), torch.zeros(n)
    freely, most = rounds_freely(fleet.scheme), 0.0

    def then_silence(step: int, rank: int, bucket: int) -> Tensor:
        return source(step, rank, bucket) * (step < 8)

    while fleet.step < 400:
        for round_ in fleet.advance(then_silence, 8):
            updates += round_.outcomes[0].update.to_dense()
            gradients += sum(then_silence(round_.step, rank, 0) for rank in range(world))
        residuals = torch.stack([buckets[0] for buckets in fleet.residuals]).sum(0)
        most = max([most, *(float(residual.abs().max()) for residual in chain(*fleet.residuals))])
        check_nothing_lost(gradients, updates, residuals, torch.full((n,), 1e-4 if freely else 0.0))
        if not any(bool(residual.any()) for residual in chain(*fleet.residuals)):
            break
    check_drained(list(chain(*fleet.residuals)), most if freely else None)
