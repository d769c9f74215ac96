"""Schemes as text: what is read, and in which words the rest is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from gradsieve.errors import ConfigError
from gradsieve.schemes import SCHEMES, ExDyna, make
from gradsieve.schemes.baselines.noop import Noop
from gradsieve_tools.specs import parse


@dataclass(frozen=True, kw_only=True)
class Fancy(Noop):
    """One field of every kind."""

    lossless = False
    paper: bool = False
    teams: int = 1
    slack: float = 1.0
    name: str = "a"
    residuals: Literal["local", "all"] = "all"
    most: int | None = None
    groups: int | Literal["auto"] = "auto"
    speeds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teams < 1:
            raise ConfigError("teams must be at least 1")


@pytest.fixture(autouse=True)
def _fancy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "fancy", Fancy)


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "fancy"])
def test_a_plain_name_is_what_make_makes_of_it(name: str) -> None:
    assert parse(name, 0.25) == make(name, 0.25)
    assert parse(name) == make(name)


def test_settings_are_read_by_the_types_of_their_fields() -> None:
    text = "fancy:paper=true+teams=2+slack=1.5+name=b+residuals=local+most=7+groups=3"
    wanted = Fancy(density=0.5, paper=True, teams=2, slack=1.5, name="b", residuals="local", most=7, groups=3)
    assert parse(text, 0.5) == wanted
    assert parse("fancy:paper=false+groups=auto", 0.5) == Fancy(density=0.5)
    assert parse("exdyna:blocks_per_partition=8", 0.01) == ExDyna(density=0.01, blocks_per_partition=8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nosuch", "no scheme is called 'nosuch'"),
        ("fancy:team=2", "'team=2'; .* paper, teams, slack, name, residuals, most, groups$"),
        ("fancy:teams", "fancy has no setting 'teams'; settings are field=value"),
        ("fancy:density=0.5", "no setting 'density=0.5'"),
        ("fancy:teams=two", "teams must be of type int, not 'two'"),
        ("fancy:paper=1", "paper must be true or false, not '1'"),
        ("fancy:residuals=none", "residuals must be local or all, not 'none'"),
        ("fancy:groups=two", "groups must be auto or of type int, not 'two'"),
        ("fancy:teams=0", "teams must be at least 1"),
        ("dense:teams=2", "dense has no setting 'teams=2'; .* fields: none"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text)
