"""The registry, the settings every scheme refuses, and the traffic each one promises."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from gradsieve.comm import lockstep
from gradsieve.errors import ConfigError
from gradsieve.schemes import SCHEMES, make
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.baselines.topk import TopK
from gradsieve.testing.gradients import Source
from gradsieve.testing.ranks import VirtualRanks
from gradsieve.types import Ctx

N, WORLD = 40_009, 4


@pytest.mark.parametrize("name", SCHEMES)
def test_every_registered_class_is_a_scheme_with_defaults(name: str) -> None:
    scheme = make(name)
    assert isinstance(scheme, Scheme)
    assert type(scheme) is SCHEMES[name]
    with pytest.raises(FrozenInstanceError):
        scheme.density = 0.5  # type: ignore[misc]


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("density", [0.0, -1.0, 1.5, float("nan")])
def test_an_impossible_density_is_refused_at_construction(name: str, density: float) -> None:
    with pytest.raises(ConfigError, match="density"):
        SCHEMES[name](density=density)


def test_a_name_that_does_not_exist_is_answered_with_those_that_do() -> None:
    with pytest.raises(
        ConfigError, match=r"no scheme is called 'topq'; did you mean 'topk'\? There are: .*topk.*exdyna"
    ):
        make("topq")


def test_topk_sends_exactly_the_k_largest_of_each_rank() -> None:
    scheme = TopK(density=0.25)
    accs = [torch.tensor([4.0, -3, 2, 1, 0, 0, 0, 0]), torch.tensor([0.0, 9, 0, 0, 0, 0, 0, -8])]
    outcomes = lockstep.run(
        [scheme.exchange(acc, scheme.begin(8, 2), Ctx(rank, 2, 0)) for rank, acc in enumerate(accs)]
    )
    assert [out.spent.indices.tolist() for out in outcomes] == [[0, 1], [1, 7]]
    assert outcomes[0].update.indices.tolist() == [0, 1, 7]
    assert outcomes[0].update.values.tolist() == [4.0, 6.0, -8.0]


@pytest.mark.parametrize("name", ["micro", "exdyna", "exdyna-paper", "micro-paper"])
def test_a_threshold_is_taken_over_when_buckets_are_rebuilt(name: str) -> None:
    fleet = VirtualRanks(make(name, 0.01), [700, 300], 3)
    for _ in fleet.advance(Source("normal", (700, 300)), 5):
        pass
    threshold = fleet.states[0][0].threshold
    fleet.rebuild([100, 900])
    assert threshold > 0
    assert {state.threshold for states in fleet.states for state in states} == {threshold}
