"""`gradsieve.testing.check_scheme`: green for every registered scheme, red for each toy that breaks a law."""

from __future__ import annotations

from typing import Any

import pytest

from gradsieve.schemes import SCHEMES, make
from gradsieve.schemes.base import Scheme
from gradsieve.testing import check_scheme
from laws import toys


@pytest.mark.parametrize("name", [name for name, kind in SCHEMES.items() if not kind.no_comm])
def test_registered_schemes_are_lawful(name: str) -> None:
    check_scheme(make(name, 0.05))


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (toys.LosesMass, "conservation: in step 0 spent and update differ"),
        (toys.RoundsAway, "conservation"),
        (toys.RankDependent, "identical ranks: rank 1 has another update"),
        (toys.DivergentState, "identical ranks: rank 1 has another state"),
        (toys.Unsorted, "valid indices: not sorted"),
        (toys.Duplicate, "valid indices: not sorted"),
        (toys.BeyondTheEnd, "valid indices: index beyond"),
        (toys.Negative, "valid indices: negative"),
        (toys.ReadsTheSum, "identical ranks: rank 1 has another update"),
        (toys.ReadsItsOwn, "conservation: in step 0 spent and update differ"),
        (toys.ChoosesByTheSum, "identical ranks: rank 1 has another update"),
        (toys.MutatesAcc, "inputs unchanged: rank 0: acc"),
        (toys.MutatesState, "inputs unchanged: rank 0: the state"),
        (toys.NeverDense, "dense at 1"),
        (toys.ThresholdPerBucket, "one threshold"),
        (toys.Starves, "all is sent"),
        (toys.FearsNan, "cannot convert float NaN"),
    ],
)
def test_a_scheme_that_breaks_a_law_is_told_which(broken: type[Scheme[Any]], law: str) -> None:
    check_scheme(toys.Toy())
    with pytest.raises(AssertionError, match=law) as error:
        check_scheme(broken())
    assert broken.__name__ in str(error.value)
