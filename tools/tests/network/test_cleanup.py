"""However a lab ends, no namespace, no file and no process of it stays; after SIGKILL, until the next lab."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gradsieve.errors
import gradsieve_tools.errors
from gradsieve_tools.emulation import Lab

pytestmark = pytest.mark.lab

TracesOf = Callable[[int], list[str]]

SOURCE = str(Path(gradsieve.errors.__file__).parents[1])

# Each rank leaves a child in a session of its own, where signals to the rank's process group do not reach it.
RANK = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "300"], start_new_session=True)
open(sys.argv[1] + "/" + os.environ["RANK"], "w").close()
time.sleep(300)
"""


LAB = """
import sys
from gradsieve_tools.emulation import Lab
with Lab(2, "1gbit", sys.argv[1] or None) as lab:
    lab.run([sys.executable, "-c", sys.argv[2], sys.argv[3]])
"""

COMMAND_LINE = """
import sys
from gradsieve_tools.cli.main import main
sys.exit(main(["lab", "run", "--hosts", "2", "--", sys.executable, "-c", *sys.argv[2:]]))
"""


class RunningLab:
    """A lab in a process of its own, whose ranks have started; all its processes carry a mark."""

    def __init__(self, folder: Path, program: str = LAB, delay: str = "", rank: str = RANK) -> None:
        self.mark = f"LAB_TEST={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, delay, rank, str(folder)],
            env={**os.environ, "PYTHONPATH": SOURCE, name: value},
            stderr=subprocess.DEVNULL,
            preexec_fn=_heed_hangups,
        )
        wait_until(lambda: {path.name for path in folder.iterdir()} >= {"0", "1"})

    def alive(self) -> list[str]:
        """Command lines of all living processes that descend from this lab."""
        return [line for line in map(self._command_line, Path("/proc").glob("[0-9]*")) if line]

    def ended_by(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=120)

    def _command_line(self, process: Path) -> str:
        try:
            marked = self.mark.encode() in (process / "environ").read_bytes().split(b"\0")
            return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode() if marked else ""
        except OSError:
            return ""


def _heed_hangups() -> None:
    """Undo what `nohup` did to whatever started the tests: an ignored signal stays ignored in children."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningLab]]:
    started: list[RunningLab] = []

    def start_one(**how: str) -> RunningLab:
        started.append(RunningLab(tmp_path, **how))
        return started[-1]

    yield start_one
    for lab in started:
        lab.process.kill()
        lab.process.wait()
    with Lab(1):  # sweeps, whatever a failed test left
        pass


def test_nothing_stays_after_the_block_ends_well_or_badly(traces_of: TracesOf) -> None:
    def fail(lab: Lab) -> None:
        badly.extend(lab.spawn(["sleep", "300"]))
        raise ZeroDivisionError

    badly: list[subprocess.Popen[bytes]] = []
    with Lab(2, "1gbit", "1ms") as lab:
        well = lab.spawn(["sleep", "300"])
        assert len(traces_of(os.getpid())) == 6  # two hosts and the switch: a namespace and a file each
    assert traces_of(os.getpid()) == []
    with pytest.raises(ZeroDivisionError), Lab(2) as lab:
        fail(lab)
    assert traces_of(os.getpid()) == []
    assert [process.returncode for process in well + badly] == [-signal.SIGTERM] * 4


def test_nothing_stays_when_building_fails_half_way(
    traces_of: TracesOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def fail(address: str, rate: int | None) -> list[str]:
        seen.append(traces_of(os.getpid()))
        return ["link set no-such-device up"]

    monkeypatch.setattr("gradsieve_tools.emulation.network.host_lines", fail)
    with (
        pytest.raises(gradsieve_tools.errors.LabError, match=r"`ip` failed in gs.*no-such-device"),
        Lab(2, None, "1ms"),
    ):
        pass
    assert len(seen[0]) == 6
    assert traces_of(os.getpid()) == []


@pytest.mark.parametrize(
    ("number", "code", "delay"),
    [(signal.SIGINT, -signal.SIGINT, "1ms"), (signal.SIGTERM, 143, "1ms"), (signal.SIGHUP, 129, "")],
)
def test_nothing_stays_after_a_signal(
    start: Callable[..., RunningLab], traces_of: TracesOf, number: signal.Signals, code: int, delay: str
) -> None:
    lab = start(delay=delay)
    # The lab, its ranks and their children, whose environment can be read a little after they have begun.
    wait_until(lambda: len([line for line in lab.alive() if "relay.py" not in line]) == 5)
    assert len(traces_of(lab.process.pid)) == 6
    assert lab.ended_by(number) == code
    assert lab.alive() == []
    assert traces_of(lab.process.pid) == []


def test_nothing_stays_after_ctrl_c_on_the_command_line(
    start: Callable[..., RunningLab], traces_of: TracesOf
) -> None:
    lab = start(program=COMMAND_LINE)
    assert lab.ended_by(signal.SIGINT) == 130
    assert lab.alive() == []
    assert traces_of(lab.process.pid) == []


def test_after_sigkill_ranks_die_at_once_and_the_next_lab_sweeps_the_rest(
    start: Callable[..., RunningLab], traces_of: TracesOf
) -> None:
    lab = start(delay="1ms")
    assert lab.ended_by(signal.SIGKILL) == -signal.SIGKILL
    # What carries no PDEATHSIG of its own outlives the lab: this is what the sweep is for.
    wait_until(lambda: lab.alive() == ["sleep 300 ", "sleep 300 "])
    assert len(traces_of(lab.process.pid)) == 6
    with Lab(1):
        assert lab.alive() == []
        assert traces_of(lab.process.pid) == []


def test_a_sweep_spares_labs_that_live(start: Callable[..., RunningLab], traces_of: TracesOf) -> None:
    lab = start()
    wait_until(lambda: len(lab.alive()) == 5)
    before = lab.alive()
    with Lab(2, "1gbit") as other:
        assert other.run(["true"]) == [0, 0]
    assert lab.alive() == before
    assert len(traces_of(lab.process.pid)) == 6


def test_children_that_a_rank_leaves_in_its_group_end_with_it(tmp_path: Path) -> None:
    with Lab(1) as lab:
        assert lab.run(["sh", "-c", 'sleep 300 & echo $! > "$0/child"', str(tmp_path)]) == [0]
        child = Path("/proc") / (tmp_path / "child").read_text().strip()
        wait_until(lambda: not child.exists() or "\nState:\tZ" in (child / "status").read_text())
