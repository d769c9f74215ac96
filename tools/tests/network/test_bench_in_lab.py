"""Benches on a lab end well: a rank that dies as it leaves costs nothing, Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gradsieve.errors import GradsieveError
from gradsieve_tools.bench.common.in_lab import rows_from_hosts
from gradsieve_tools.cli.main import main
from processes import SOURCE, running, wait_until

pytestmark = pytest.mark.lab

WORKER = """
import os
import torch.distributed as dist
from gradsieve_tools.bench.common import in_lab

def dies(config):
    if dist.get_rank() == config["odd"]:
        os.abort()

def measure(config):
    if not config["complete"]:
        dies(config)
    dist.barrier()
    return [{"sync": "dense", "step_ms": 3.5}]

def leave():
    dist.barrier()  # the result is written
    dies({"odd": 1})
    os._exit(0)

in_lab.leave = leave
in_lab.run_rank(measure)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "odd_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([SOURCE, str(tmp_path)]))
    return "odd_worker"


def config(complete: bool) -> dict[str, object]:
    return {"hosts": 2, "rate": None, "delay": None, "odd": 1, "complete": complete}


def test_a_rank_that_dies_as_it_leaves_does_not_cost_the_result(
    worker: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert rows_from_hosts(worker, config(complete=True)) == [{"sync": "dense", "step_ms": 3.5}]
    assert "gradsieve: warning: host 1 ended with exit code -6 as it left" in capfd.readouterr().err


def test_a_rank_that_dies_before_does(worker: str) -> None:
    with pytest.raises(GradsieveError, match=r"exit codes \[.*-6\]"):
        rows_from_hosts(worker, config(complete=False))


def test_a_small_model_is_measured_and_the_spread_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slow: four hosts start a training each, three times."""
    out = tmp_path / "step.json"
    syncs = "exdyna,exdyna@steps:every=2,exdyna:values=bf16@paper"
    size = ["--hosts", "2", "--params", "1e5", "--rounds", "2", "--syncs", syncs]
    assert main(["bench", "step", *size, "--json", str(out), "--record", str(tmp_path / "record")]) == 0
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err
    assert "warning: host" not in printed.err
    rows = {row["sync"]: row for row in json.loads(out.read_text())["rows"]}
    assert [row["late"] for row in rows.values()] == [None, 0, 1, 2, 0, 1, 2, 0]
    recorded = rows["exdyna, recorded"]
    assert 0 < recorded["recorder_ms"] < recorded["step_ms"]
    low, high = recorded["vs_noop_half"]
    assert low <= recorded["vs_noop"] <= high
    head, *table, doubt = printed.out.splitlines()
    assert {"vs_noop_half", "vs_dense_half", "recorder_ms"} <= set(head.split())
    assert " to " in table[-1]
    assert "Fewer than 3 rounds show no spread" in doubt


@pytest.mark.parametrize("bench", ["step", "exchange", "time-to-accuracy"])
def test_an_interruption_of_the_command_alone_leaves_nothing(
    bench: str, traces_of: Callable[[int], list[str]]
) -> None:
    # Deaf to SIGINT from birth, as what a script starts in the background.
    with running("bench", bench, "--hosts", "2", on_interruption=signal.Handlers.SIG_IGN) as command:
        wait_until(lambda: len(command.alive()) >= 3)
        code, output = command.interrupted()
        assert (code, "Traceback" in output) == (130, False)
        assert command.alive() == []
        assert traces_of(command.process.pid) == []


def test_hosts_of_several_ranks_are_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Slow: two hosts start two ranks each, which import FSDP."""
    out = tmp_path / "hsdp.json"
    size = ["--params", "1e5", "--rounds", "1", "--steps", "40", "--rate", "1gbit"]
    assert main(["bench", "hsdp", *size, "--json", str(out)]) == 0
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err
    rows = {row["sync"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["auto"]["replicas_equal_for"] >= 40
    assert rows["noop"]["bytes_sent"] < rows["auto"]["bytes_sent"] < rows["dense"]["bytes_sent"]
