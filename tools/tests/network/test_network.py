"""A lab is a network: its links are as slow as asked, its hosts see only each other, ranks are watched."""

import json
import os
import signal
import socket
import statistics
import sys
from pathlib import Path

import pytest

from gradsieve_tools.emulation import Lab, ranks
from gradsieve_tools.errors import LabError

pytestmark = pytest.mark.lab

# Rank r runs the function of this module that ROLES names at its place, and leaves its answer in FOLDER/r.
PEER = '''
import json, os, select, socket, time

rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = [f"198.18.0.{i + 1}" for i in range(count)]
size = int(os.environ.get("SIZE", "0"))


def accept():
    link, _ = server.accept()
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def connect(host):
    for _ in range(200):
        try:
            link = socket.create_connection((address[host], 5001))
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return link
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise SystemExit(f"nobody listens on host {host}")


def sink_of(senders):
    """Bits per second of all senders together, from their common start to the last byte."""
    links = [accept() for _ in range(senders)]
    start = time.perf_counter()
    for link in links:
        link.sendall(b"g")
    missing = senders * size
    while missing:
        for link in select.select(links, [], [])[0]:
            missing -= len(link.recv(1 << 20))
    return senders * size * 8 / (time.perf_counter() - start)


def source_to(*hosts):
    links = [connect(host) for host in hosts]
    for link in links:
        link.recv(1)
    for start in range(0, size, 100_000):
        for link in links:
            link.sendall(bytes(min(100_000, size - start)))
    for link in links:
        link.recv(1)


def echo():
    link = accept()
    while link.recv(1):
        link.sendall(b"e")


def ping(host):
    link = connect(host)
    def once():
        start = time.perf_counter()
        link.sendall(b"p")
        link.recv(1)
        return time.perf_counter() - start
    once()
    return [once() for _ in range(20)]


server = socket.create_server((address[rank], 5001))
answer = eval(os.environ["ROLES"].split("|")[rank])
with open(os.path.join(os.environ["FOLDER"], str(rank)), "w") as file:
    json.dump(answer, file)
'''


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def played(lab: Lab, folder: Path, *roles: str, **env: str) -> list[object]:
    """What each host answered after playing its role."""
    settings = {"ROLES": "|".join(roles), "FOLDER": str(folder), **env}
    assert lab.run(python(PEER), timeout=30, env=settings) == [0] * len(roles)
    return [json.loads((folder / str(rank)).read_text()) for rank in range(len(roles))]


def throughput(folder: Path, size: int, rate: str | None, delay: str | None = None) -> float:
    with Lab(2, rate, delay) as lab:
        answers = played(lab, folder, "sink_of(1)", "source_to(0)", SIZE=str(size))
    assert isinstance(answers[0], float)
    return answers[0]


# --- rate


def test_a_link_carries_its_rate_and_an_unshaped_one_many_times_more(tmp_path: Path) -> None:
    shaped = throughput(tmp_path, 12_500_000, "100mbit")
    unshaped = throughput(tmp_path, 12_500_000, "unshaped")
    assert 70e6 < shaped < 105e6
    assert unshaped > 5 * shaped


# --- delay


def test_a_round_trip_takes_twice_the_delay_and_almost_nothing_without(tmp_path: Path) -> None:
    def round_trip(delay: str | None) -> float:
        with Lab(2, None, delay) as lab:
            times = played(lab, tmp_path, "echo()", "ping(0)")[1]
        assert isinstance(times, list)
        assert delay is None or min(times) >= 0.010
        return statistics.median(times)

    assert 0.010 <= round_trip("5ms") < 0.025
    assert round_trip(None) < 0.005


def test_a_relay_that_dies_is_an_error_and_not_a_hang() -> None:
    with Lab(2, None, "5ms") as lab:
        if lab._relay is None:
            pytest.skip("this kernel has netem, so there is no relay")
        lab._relay.kill()
        with pytest.raises(LabError, match="the relay that carries the hosts' packets ended"):
            lab.run(["sleep", "60"], timeout=30)


REACH = """
import json, os, socket
def reach(address):
    try:
        socket.create_connection(address, timeout=5).close()
    except OSError as error:
        return error.errno
    return 0
outside, machine = ("192.0.2.1", 80), ("127.0.0.1", int(os.environ["PORT"]))
neighbour = (f"198.18.0.{2 - int(os.environ['RANK'])}", 5001)
found = [reach(outside), reach(machine), reach(neighbour)]
assert found == [101, 111, 111], found  # network unreachable; nobody listens there; nobody listens there
"""


@pytest.mark.parametrize("delay", [None, "1ms"])
def test_a_host_reaches_its_neighbour_but_nothing_outside(delay: str | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Lab(2, None, delay) as lab:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        assert lab.run(python(REACH), timeout=30, env={"PORT": str(port)}) == [0, 0]


# --- ranks


def test_ranks_find_what_torchrun_would_set(tmp_path: Path) -> None:
    program = (
        "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + '/' + os.environ['RANK'], 'w'))"
    )
    with Lab(3) as lab:
        assert lab.run([*python(program), str(tmp_path)], env={"EXTRA": "1"}) == [0, 0, 0]
        assert lab.addresses == ["198.18.0.1", "198.18.0.2", "198.18.0.3"]
        assert lab.netns(1) == f"gs{os.getpid()}-1"
    for rank in "012":
        found = json.loads((tmp_path / rank).read_text())
        own = {name: found[name] for name in ("RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK")}
        assert set(own.values()) == {rank}
        assert (found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("3", "0", "1")
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("198.18.0.1", "29500")
        assert (found["GLOO_SOCKET_IFNAME"], found["TP_SOCKET_IFNAME"]) == ("eth0", "eth0")
        assert found["EXTRA"] == "1"


def test_a_failing_rank_is_named_with_its_code(capfd: pytest.CaptureFixture[str]) -> None:
    with Lab(3) as lab:
        assert lab.run(["sh", "-c", 'test "$RANK" != 2 || exit 3']) == [0, 0, 3]
        assert lab.first_failure == 2
        assert lab.run(["true"]) == [0, 0, 0]
        assert lab.first_failure is None
    assert capfd.readouterr().err == "[lab] rank 2 exited with code 3\n"


@pytest.mark.parametrize(
    ("on_sigterm", "code"),
    [("exit 0", -signal.SIGTERM), ("exit 7", 7), (":", -signal.SIGKILL)],
    ids=["exits as if well", "exits with a code", "takes no notice"],
)
def test_the_others_are_ended_after_a_rank_failed(
    on_sigterm: str, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(ranks, "STOP_SECONDS", 0.5)
    script = f'test "$RANK" != 1 || exit 3; trap "{on_sigterm}" TERM; while :; do sleep 0.05; done'
    with Lab(2) as lab:
        assert lab.run(["sh", "-c", script], timeout=30) == [code, 3]
        assert lab.first_failure == 1
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[lab] ")]
    assert said == [
        "[lab] rank 1 exited with code 3",
        "[lab] still running after rank 1 failed, and ended now: rank 0",
    ]


def test_a_run_that_lasts_too_long_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    with Lab(3) as lab:
        codes = lab.run(["sh", "-c", 'test "$RANK" = 1 || sleep 60'], timeout=0.5)
        assert codes == [-signal.SIGTERM, 0, -signal.SIGTERM]
        assert lab.first_failure == 0
    expected = "[lab] timed out after 0.5 s; still running, and ended now: rank 0, 2\n"
    assert capfd.readouterr().err == expected
