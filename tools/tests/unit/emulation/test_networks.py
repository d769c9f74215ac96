"""Network files: what is read, what is refused with its line, where packets go."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.errors import ConfigError
from gradsieve_tools.emulation import quotas
from gradsieve_tools.emulation.topology import Host, Link, Topology, read

GOOD = """\
switches = ["rack", "office"]

[hosts]
ant = {}
bee = { cpus = 0.5, gloo_interface = "eth1" }

[[links]]
from = ["ant", "bee"]
to = "rack"
rate = "1gbit"

[[links]]
from = ["ant", "bee"]
to = "office"
delay = "5ms"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "net.toml"
    path.write_text(text)
    return path


def test_a_file_says_hosts_switches_and_links(tmp_path: Path) -> None:
    found = read(written(tmp_path, GOOD))
    assert found.hosts == (Host("ant"), Host("bee", 0.5, "eth1"))
    assert found.links[1] == Link("bee", "rack", 10**9, None)
    assert found.links[3] == Link("bee", "office", None, 0.005)
    assert [(p.host, p.interface, p.address) for p in found.ports] == [
        (0, "eth0", "198.18.1.1"),
        (0, "eth1", "198.18.0.1"),
        (1, "eth0", "198.18.1.2"),
        (1, "eth1", "198.18.0.2"),
    ]
    assert found.addresses == ["198.18.1.1", "198.18.1.2"]


@pytest.mark.parametrize(
    ("old", "new", "line", "cause"),
    [
        ('rate = "1gbit"', 'rte = "1gbit"', 10, "'rte' is not known here: did you mean 'rate'?"),
        ('rate = "1gbit"', "rate = 1000", 10, "rate is text in quotes"),
        ('delay = "5ms"', 'delay = "5m"', 15, "delay '5m' is not a one-way delay"),
        ("cpus = 0.5", "cpus = 0", 5, "cpus is 0; it is 0.05 to 1024"),
        ('"eth1"', '"eth2"', 5, "'bee' has no 'eth2', only eth0, eth1"),
        ("ant = {}", "Ant = {}", 4, "'Ant' is no name"),
        ("ant = {}", "ant = {}\nfly = {}", 5, "no link leads to host 'fly'"),
        ('["rack", "office"]', '["rack", "office", "ant"]', 1, "two things are called 'ant'"),
        ('to = "office"', 'to = "ofice"', 14, "'ofice' is not known; a link leads to a switch"),
        ('to = "office"', 'to = "ant"', 14, "'ant' is a host; a link leads to a switch"),
        (
            "[[links]]\n",
            '[[links]]\nfrom = ["office"]\nto = "rack"\n\n[[links]]\n',
            4,
            "'ant' is twice in one network",
        ),
        ("ant = {}", "ant = {", 4, ""),
        ("switches", "switch", 1, "'switch' is not known here: did you mean 'switches'?"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_line(
    old: str, new: str, line: int, cause: str, tmp_path: Path
) -> None:
    path = written(tmp_path, GOOD.replace(old, new, 1) if old in GOOD else new)
    with pytest.raises(ConfigError) as refused:
        read(path)
    assert str(refused.value).startswith(f"{path}, line {line}: {cause}")


def test_hosts_that_cannot_reach_each_other_are_refused(tmp_path: Path) -> None:
    text = GOOD.replace('from = ["ant", "bee"]\nto = "rack"', 'from = ["ant"]\nto = "rack"')
    text = text.replace('from = ["ant", "bee"]\nto = "office"', 'from = ["bee"]\nto = "office"')
    with pytest.raises(ConfigError, match="line 5: 'bee' cannot reach the first host over eth0"):
        read(written(tmp_path, text))


@st.composite
def trees(draw: st.DrawFn) -> Topology:
    count = draw(st.integers(1, 6))
    switches = tuple(f"s{i}" for i in range(count))
    joins = [Link(f"s{i}", f"s{draw(st.integers(0, i - 1))}", 10**6 * i, 0.001 * i) for i in range(1, count)]
    hosts = tuple(Host(f"h{i}") for i in range(draw(st.integers(1, 6))))
    ups = [Link(host.name, draw(st.sampled_from(switches)), 10**9) for host in hosts]
    return Topology(hosts, switches, tuple(draw(st.permutations([*joins, *ups]))))


@given(trees())
def test_every_host_has_one_way_to_every_other_and_the_same_back(topology: Topology) -> None:
    ways = {(a.host, b.host): way for a in topology.ports for b, way in topology.ways(a)}
    hosts = range(len(topology.hosts))
    assert set(ways) == {(a, b) for a in hosts for b in hosts if a != b}
    for (a, b), way in ways.items():
        assert [(link, not forward) for link, forward in reversed(way)] == ways[b, a]
        ends = [topology.links[link].ends[:: 1 if forward else -1] for link, forward in way]
        assert (ends[0][0], ends[-1][1]) == (topology.hosts[a].name, topology.hosts[b].name)
        assert all(before[1] == after[0] for before, after in pairwise(ends))


@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_is_written_as_cgroups_want_it(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In folders that look like the kernel's: this machine has one of the two versions."""
    monkeypatch.setattr(quotas, "ROOT", tmp_path)
    folder = tmp_path if version == 2 else tmp_path / "cpu"
    group = folder / "gs1-0"
    group.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io" if version == 2 else "cpuset io")
    if version == 2:
        (group / "cpu.max").touch()
    else:
        (folder / "cpu.cfs_quota_us").touch()
    quotas.create({"gs1-0": 0.25})
    assert quotas.existing() == {"gs1-0"}
    found = {path.name: path.read_text() for path in group.iterdir()}
    if version == 2:
        assert found == {"cpu.max": "25000 100000"}
    else:
        assert found == {"cpu.cfs_quota_us": "25000", "cpu.cfs_period_us": "100000"}
