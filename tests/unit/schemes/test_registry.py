"""Schemes are imported when they are asked for, and other packages add theirs by entry points."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from gradsieve import ConfigError, schemes
from gradsieve.schemes import Registry, make
from laws import toys

LOADED = "print(*sorted(name for name in sys.modules if name.startswith('gradsieve.schemes.')))"


def loaded(code: str) -> set[str]:
    """The modules of schemes in a new process, without what every scheme is written with."""
    script = f"import sys, gradsieve\n{code}\n{LOADED}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names = {name.removeprefix("gradsieve.schemes.") for name in done.stdout.split()}
    return names - {"base"}


def test_only_the_scheme_that_is_asked_for_is_imported() -> None:
    assert loaded("gradsieve.schemes.make('stripes', 0.1)") == {"stripes"}
    assert loaded("'dense' in gradsieve.schemes.SCHEMES") == {"baselines", "baselines.dense"}
    assert "stripes" not in loaded("gradsieve.schemes.ExDyna(density=0.1)")
    assert len(loaded("dict(gradsieve.schemes.SCHEMES)")) > 20, (
        "the twin: all of them, when all are asked for"
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry next to a package with schemes of its own."""
    theirs = [("toy", "laws.toys:Toy"), ("dense", "laws.toys:Toy"), ("gone", "laws.toys:Nothing")]
    found = EntryPoints(EntryPoint(name, place, schemes.GROUP) for name, place in theirs)
    monkeypatch.setattr(schemes, "entry_points", lambda group: found.select(group=group))
    return Registry({"dense": "gradsieve.schemes.baselines.dense:Dense"})


def test_another_package_adds_schemes(installed: Registry) -> None:
    assert list(installed) == ["dense", "toy", "gone"]
    assert installed["toy"] is toys.Toy
    assert installed.name_of(toys.Toy) == "toy"
    assert "nobody" not in installed
    with pytest.raises(AttributeError, match="Nothing"):
        installed["gone"]


def test_another_package_takes_no_name_of_ours(installed: Registry) -> None:
    assert installed["dense"] is schemes.Dense
    assert installed.name_of(schemes.Dense) == "dense"


def test_without_the_tools_it_is_said_where_their_schemes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(make("dgc")).__module__ == "gradsieve_tools.baselines.dgc"
    monkeypatch.setattr(schemes, "entry_points", lambda group: EntryPoints())
    monkeypatch.setattr(schemes, "SCHEMES", Registry({"dense": "gradsieve.schemes.baselines.dense:Dense"}))
    with pytest.raises(ConfigError, match="'dgc' is in another package: pip install gradsieve-tools"):
        make("dgc")
