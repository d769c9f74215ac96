"""Networks of several switches, hosts with quotas, and the doctor who is called to them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_network import played, python

from gradsieve_tools.emulation import Lab, quotas
from gradsieve_tools.emulation.topology import Host, Link, Topology

pytestmark = pytest.mark.lab

SAMPLES = Path(__file__).parents[3] / "examples" / "networks"


def two_sites(delay: float | None) -> Topology:
    """ant and bee are near each other, cat is behind a link of 20 Mbit/s."""
    hosts = tuple(map(Host, ("ant", "bee", "cat")))
    near = (Link("ant", "one"), Link("bee", "one"), Link("cat", "two"))
    return Topology(hosts, ("one", "two"), (*near, Link("one", "two", 20_000_000, delay)))


@pytest.mark.parametrize("delay", [None, 0.002], ids=["bridges", "delayed"])
def test_a_slow_link_between_switches_is_slow_for_those_beyond_it(
    delay: float | None, tmp_path: Path
) -> None:
    with Lab(two_sites(delay)) as lab:
        near = played(lab, tmp_path, "source_to(1)", "sink_of(1)", "None", SIZE="1000000")[1]
        far = played(lab, tmp_path, "source_to(2)", "None", "sink_of(1)", SIZE="1000000")[2]
        trips = played(lab, tmp_path, "ping(2)", "None", "echo()")[0]
    assert isinstance(near, float)
    assert isinstance(far, float)
    assert far < 22e6 < near
    assert isinstance(trips, list)
    assert delay is None or min(trips) >= 2 * delay


BUSY = """
import os, time
end = time.monotonic() + 0.5
while time.monotonic() < end: pass
is_ours = "/gs" in open("/proc/self/cgroup").read()
assert is_ours == (os.environ["RANK"] == "1")
"""


def test_a_host_with_a_quota_is_throttled_and_others_are_not() -> None:
    folder = quotas._folder()
    if folder is None:
        pytest.skip("no cpu controller of cgroups here")
    hosts = (Host("ant"), Host("snail", 0.05))
    with Lab(Topology(hosts, ("rack",), (Link("ant", "rack"), Link("snail", "rack")))) as lab:
        assert lab.run(python(BUSY), timeout=60) == [0, 0]
        stat = (folder / lab.netns(1) / "cpu.stat").read_text().split()
        assert int(stat[stat.index("nr_throttled") + 1]) > 0
        assert not (folder / lab.netns(0)).exists()
    assert lab.netns(1) not in quotas.existing()


@pytest.mark.parametrize(
    ("sample", "code", "rules"),
    [("slow-link", 1, {("wrong-interface", 1), ("slow-link", 3)}), ("healthy", 0, set())],
)
def test_the_doctor_names_what_is_wrong_and_nothing_where_all_is_well(
    sample: str, code: int, rules: set[tuple[str, int]], tmp_path: Path
) -> None:
    out = tmp_path / "doctor.json"
    gradsieve = [sys.executable, "-m", "gradsieve_tools.cli.main"]
    lab = [*gradsieve, "lab", "run", "--network", str(SAMPLES / f"{sample}.toml"), "--timeout", "240", "--"]
    doctor = [*gradsieve, "doctor", "--json", str(out)]
    done = subprocess.run([*lab, *doctor], capture_output=True, text=True)
    assert done.returncode == code, done.stderr + done.stdout
    found = [row for row in json.loads(out.read_text())["rows"] if row["severity"] != "note"]
    assert {(row["rule"], rank) for row in found for rank in row["ranks"]} == rules
    assert ("export GLOO_SOCKET_IFNAME=eth0" in done.stdout) == bool(rules)
    assert "a sum by gloo, around a ring: " in done.stdout
