"""Published schemes: rules over the whole model, with the exchange of their papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsieve.errors import ConfigError
from gradsieve.pipeline.exchange_settings import Gradients, Steps, choose_exchange, choose_scheme
from gradsieve.pipeline.gradients import GradientPipeline
from gradsieve.schemes import SCHEMES, make

FIVE = ["exdyna", "micro", "deft", "oktopk", "spardl"]


def test_the_five_papers_are_published_and_nothing_else() -> None:
    assert {name for name in SCHEMES if name.endswith("-paper")} == {f"{name}-paper" for name in FIVE}
    published = {SCHEMES[f"{name}-paper"] for name in FIVE}
    assert {kind for kind in SCHEMES.values() if kind.whole_model} == published


@pytest.mark.parametrize("name", FIVE)
def test_a_published_scheme_brings_its_own_exchange(name: str) -> None:
    scheme = choose_scheme(f"{name}-paper", 0.02, None, None)
    assert type(scheme) is SCHEMES[f"{name}-paper"]
    assert scheme.density == 0.02
    assert choose_exchange(None, scheme) == Gradients(small=0)
    assert choose_exchange(Steps(), scheme) == Steps(), "but for who asks for something else"


@pytest.mark.parametrize("name", FIVE)
def test_ours_of_the_same_name_exchanges_steps(name: str) -> None:
    scheme = choose_scheme(name, 0.02, None, None)
    assert type(scheme) is SCHEMES[name]
    assert choose_exchange(None, scheme) == Steps()


@pytest.mark.parametrize("name", FIVE)
def test_published_rules_lie_over_the_whole_model_and_ours_over_units(name: str) -> None:
    parameters = {f"p{number}": torch.zeros(40, 10) for number in range(6)}
    for published in (True, False):
        scheme = make(f"{name}-paper" if published else name, 0.1)
        pipeline = GradientPipeline(parameters, (), scheme, Gradients(), 0, 2, 0.001)
        assert len(pipeline.units) == (1 if published else 6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("exdyna-paper", {"blocks": 0}),
        ("exdyna-paper", {"multiple": 0}),
        ("exdyna-paper", {"blk_move": 0}),
        ("exdyna-paper", {"alpha": 0.9}),
        ("exdyna-paper", {"least": 1.1}),
        ("exdyna-paper", {"beta": 0.9}),
        ("micro-paper", {"gamma": 1.0}),
        ("micro-paper", {"start": 0.0}),
        ("deft-paper", {"floor": -1}),
        ("oktopk-paper", {"local_period": 0}),
        ("oktopk-paper", {"global_up": 0.9}),
        ("oktopk-paper", {"guard_rounds": -1}),
        ("spardl-paper", {"moves": 0}),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SCHEMES[name](**settings)
