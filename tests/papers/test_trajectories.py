"""The first 200 steps of published Ok-Topk and SparDL are those of a second program, and of no other.

It is written straight from a description of the method. `test_released.py` has what the released code of
ExDyna, MiCRO and DEFT chose.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from papers.trajectories import PAPERS, check_same


@pytest.mark.parametrize("name", PAPERS)
def test_the_first_steps_are_those_of_the_paper(name: str) -> None:
    check_same(name, PAPERS[name])


CHANGED: list[tuple[str, dict[str, Any]]] = [
    ("oktopk", {"local_period": 31}),
    ("oktopk", {"global_period": 31}),
    ("oktopk", {"region_period": 32}),
    ("oktopk", {"dense_steps": 1}),
    ("oktopk", {"guard": 1.4}),
    ("oktopk", {"guard_factor": 1.02}),
    ("oktopk", {"guard_rounds": 4}),
    ("oktopk", {"local_few": 0.75}),
    ("oktopk", {"local_many": 1.2}),
    ("oktopk", {"local_down": 1.01}),
    ("oktopk", {"local_up": 1.01}),
    ("oktopk", {"global_few": 0.75}),
    ("oktopk", {"global_many": 1.25}),
    ("oktopk", {"global_down": 1.01}),
    ("oktopk", {"global_up": 1.01}),
    ("spardl", {"density": 0.04}),
    ("spardl", {"teams": 5}),
    ("spardl", {"residuals": "local"}),
    ("spardl", {"residuals": "end"}),
    ("spardl, b-sag", {"moves": 50}),
    ("spardl, b-sag", {"across": "r-sag"}),
    ("spardl, r-sag", {"across": "b-sag"}),
    ("spardl, r-sag", {"teams": 2}),
]


@pytest.mark.parametrize(("name", "changed"), CHANGED, ids=str)
def test_another_constant_is_seen(name: str, changed: dict[str, Any]) -> None:
    """The twin: within the same 200 steps."""
    with pytest.raises(AssertionError, match=r"step \d+: another"):
        check_same(name, PAPERS[name].with_settings(**changed))


@pytest.mark.parametrize("name", ["oktopk", "spardl"])
def test_every_constant_has_its_twin(name: str) -> None:
    changed = {field for case, fields_ in CHANGED for field in fields_ if case.startswith(name)}
    constants = {field.name for field in fields(PAPERS[name].scheme)}
    assert constants - changed <= {"density", "lopsided"}, "lopsided changes messages only"
