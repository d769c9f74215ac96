"""ExDyna, MiCRO, DEFT choose what their released code chose in 250 of 250 steps; with another constant not.

The traces in `tests/data/released` are figures; `scripts/record_released.py` made them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from papers.released import RELEASED, check_same, recorded


@pytest.mark.parametrize("name", RELEASED)
def test_gradients_are_those_that_were_recorded_with(name: str) -> None:
    """If not, it is the generator that changed, and no scheme."""
    assert RELEASED[name].digest() == recorded(name)["gradients"]


@pytest.mark.parametrize("name", RELEASED)
def test_every_step_chooses_what_the_released_code_chose(name: str) -> None:
    check_same(name, RELEASED[name])


CHANGED: list[tuple[str, dict[str, Any]]] = [
    ("exdyna", {"blocks": 1000}),
    ("exdyna", {"multiple": 20}),
    ("exdyna", {"alpha": 1.1}),
    ("exdyna", {"blk_move": 2}),
    ("exdyna", {"least": 0.3}),
    ("exdyna", {"start": 0.51}),
    ("exdyna", {"beta": 1.12}),
    ("exdyna", {"gamma": 0.0051}),
    ("exdyna", {"inside": 0.26}),
    ("micro", {"start": 0.51}),
    ("micro", {"beta": 1.12}),
    ("micro", {"gamma": 0.0051}),
    ("micro", {"inside": 0.26}),
    ("deft", {"floor": 2}),
]


@pytest.mark.parametrize(("name", "changed"), CHANGED, ids=str)
def test_another_constant_is_seen(name: str, changed: dict[str, Any]) -> None:
    """The twin: within the same 250 steps."""
    with pytest.raises(AssertionError, match=r"step \d+: other"):
        check_same(name, RELEASED[name].with_settings(**changed))


@pytest.mark.parametrize("name", RELEASED)
def test_every_constant_has_its_twin(name: str) -> None:
    changed = {field for case, settings in CHANGED for field in settings if case == name}
    assert {field.name for field in fields(RELEASED[name].scheme)} - changed == {"density"}
