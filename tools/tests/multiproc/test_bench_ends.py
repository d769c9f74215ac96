"""Benches with processes of their own end well: ranks that leave, and Ctrl-C."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gradsieve_tools.bench.common.ranks import run_ranks
from processes import SOURCE, running, wait_until

BUSY_RANK = """
import threading, torch
from gradsieve_tools.bench.common.in_lab import run_rank

def work():
    while True:
        torch.ones(100) + 1

def measure(config):
    threading.Thread(target=work, daemon=True).start()
    return [config]

run_rank(measure)
"""


def test_a_rank_leaves_well_while_a_thread_is_still_at_work(tmp_path: Path) -> None:
    """As those of gloo can be: Python's own end would abort it."""
    out = tmp_path / "rows.json"
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", BUSY_RANK, json.dumps({"params": 3, "out": str(out)})],
        env={**os.environ, "PYTHONPATH": SOURCE, **world},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(out.read_text()) == [{"params": 3}]


def sleep(rank: int, folder: str) -> None:
    (Path(folder) / str(rank)).touch()
    time.sleep(1000)


def test_ranks_end_with_whoever_started_them(tmp_path: Path) -> None:
    def interrupt() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(sleep, (str(tmp_path),), 2)
        wait_until(lambda: multiprocessing.active_children() == [], seconds=10)
    finally:
        signal.signal(signal.SIGINT, before)
        for child in multiprocessing.active_children():
            child.kill()


ACCURACY = ["accuracy", "--tasks", "recommender", "--densities", "0.01", "--world", "2", "--steps", "1000000"]


@pytest.mark.parametrize(
    ("bench", "processes"),
    [
        pytest.param([*ACCURACY, "--syncs", "exdyna", "--folder"], 3, id="virtual ranks in a pool"),
        pytest.param([*ACCURACY, "--syncs", "powersgd", "--folder"], 5, id="real ranks in a pool"),
        pytest.param(["memory", "--params", "1e8", "--json"], 4, id="real ranks"),
    ],
)
def test_an_interruption_of_the_command_alone_ends_all_its_processes(
    tmp_path: Path, bench: list[str], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    with running("bench", *bench, str(tmp_path / "result")) as command:
        wait_until(lambda: len(command.alive()) >= processes)
        assert command.interrupted() == (130, "")
        wait_until(lambda: command.alive() == [], seconds=10)
    assert list(scratch.iterdir()) == []
