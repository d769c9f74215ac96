"""Profiles: what is written is read again, and what is none is refused with its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.comm.links import Links
from gradsieve.errors import ConfigError
from gradsieve_tools import profiles
from gradsieve_tools.profiles import ModelProfile, Pairs, Profile
from gradsieve_tools.quantities import BITS, BYTES_A_SECOND, ELEMENTS_A_SECOND, SECONDS, parse, write

WHOLE = Profile(
    world=2,
    hosts=2,
    latency=1e-4,
    bandwidth=9.4e8,
    message=2e-5,
    slowest_latency=2e-4,
    slowest_bandwidth=9.1e8,
    memory=8.1e9,
    selection=7.5e8,
    ring=Links(0.24, 32 / 9.5e7),
    pairs=Pairs(((None, 1e-4), (2e-4, None)), ((None, 9.4e8), (9.1e8, None))),
    model=ModelProfile(25_000_000, 3, 0.1, 0.2),
    made={"date": "2026-11-16", "command": 'gradsieve doctor --model "a\\b"'},
)
PLAIN = replace(WHOLE, ring=None, pairs=None, model=None, made={})


def written(folder: Path, text: str) -> Path:
    path = folder / "profile.toml"
    path.write_text(text)
    return path


def close(one: Profile, other: Profile) -> bool:
    names = ["latency", "bandwidth", "message", "slowest_latency", "slowest_bandwidth", "memory", "selection"]
    names += ["launch"]
    return all(getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-3) for name in names)


@pytest.mark.parametrize(
    "profile", [WHOLE, PLAIN, replace(PLAIN, model=ModelProfile(7, 1)), replace(PLAIN, launch=2e-5)]
)
def test_what_is_written_is_read_again(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    profiles.write_profile(path, profile)
    found = profiles.read(path)
    assert close(found, profile)
    assert found.model == profile.model
    assert (found.ring is None) == (profile.ring is None)
    if found.ring is not None:
        assert found.ring.latency == pytest.approx(0.24)
        assert found.ring.word == pytest.approx(32 / 9.5e7)
    assert (found.pairs is None) == (profile.pairs is None)
    if found.pairs is not None:
        assert found.pairs.latency[1][0] == pytest.approx(2e-4)
        assert found.pairs.bandwidth[0][0] is None


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("version = 1", "version = 2", "line 1: version 2 is of a later gradsieve"),
        ('latency = "100us"', 'latency = "100"', "line 8: '100' is not a time"),
        ('latency = "100us"', 'delay = "100us"', "line 8: 'delay' is not known here"),
        ('memory = "8.1GB/s"', 'memory = "8.1gb/s"', "line 17: '8.1gb/s' is not one such as"),
        ("world = 2", "world = 1", "line 4: world is 1; it is 2 to 65,536"),
        ("[host]", "[hots]", "line 16: 'hots' is not known here: did you mean 'host'?"),
    ],
)
def test_what_is_no_profile_is_refused_with_its_line(old: str, new: str, cause: str, tmp_path: Path) -> None:
    text = profiles.text_of(PLAIN)
    assert old in text
    with pytest.raises(ConfigError) as refused:
        profiles.read(written(tmp_path, text.replace(old, new, 1)))
    assert cause in str(refused.value)


@given(st.floats(1e-6, 1e11), st.sampled_from([BITS, SECONDS, BYTES_A_SECOND, ELEMENTS_A_SECOND]))
def test_what_is_written_with_a_unit_is_read_again(number: float, units: dict[str, float]) -> None:
    value = number * min(units.values())
    if value < 1e8 * max(units.values()):
        read = parse(write(value, units), units)
        assert read == pytest.approx(value, rel=1e-3, abs=1e-3 * min(units.values()))
