"""`gradsieve bench plan` but for the lab itself."""

from pathlib import Path

import pytest

from gradsieve.errors import GradsieveError
from gradsieve_tools.plan_validation import measure as validate
from gradsieve_tools.plan_validation.measure import Case, Place, compare, run_all, summary
from gradsieve_tools.profiles import Profile, write_profile

CASES = [Case(Place(hosts, "1gbit", "5ms"), 1_000_000, 0.01, ["dense", "exdyna"], 3) for hosts in (2, 4)]
PROFILE = Profile(2, 2, 5e-3, 1e9, 2e-5, 5e-3, 1e9, memory=10e9, selection=500e6)
STEPS = {"noop": 10.0, "dense": 80.0, "exdyna": 20.0}


def test_a_wrong_choice_is_counted_as_one() -> None:
    rows = compare(CASES[0], PROFILE, {}, STEPS)
    assert summary(rows)["choices_within_margin"] == 1.0
    swapped = compare(CASES[0], PROFILE, {}, STEPS | {"dense": 20.0, "exdyna": 80.0})
    assert summary(swapped)["choices_within_margin"] == 0.0


def test_a_broken_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def measure(case: Case, profile: Path) -> dict[str, dict[str, float]]:
        ran.append(case.place.hosts)
        if case.place.hosts == 4 and len(ran) == 2:
            raise GradsieveError("the lab fell over")
        write_profile(profile, PROFILE)
        return {"exchanges": {}, "steps": STEPS}

    monkeypatch.setattr(validate, "measure", measure)
    rows, failed = run_all(CASES, tmp_path, lambda doing: None)
    assert (len(rows), len(failed)) == (2, 1)
    rows, failed = run_all(CASES, tmp_path, lambda doing: None)
    assert (len(rows), failed) == (4, [])
    assert ran == [2, 4, 4]
