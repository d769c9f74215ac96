"""Trainings under torchrun come back: dead workers, dead and replaced nodes, notices, a node that is late."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import multiproc.harness  # noqa: F401  # tells the fork server what to load
from gradsieve import kernels
from gradsieve_tools.spot.nodes import Node, Nodes, wait_for

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import restarts

SCRIPT = str(Path(__file__).with_name("restarting.py"))
STEPS = 100


# -- one node, by torchrun's own agent, on ranks that are forked from a process with torch loaded -----------


def launched(run: Path, **settings: Any) -> dict[int, str]:
    """What each rank says at its end."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=1,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="forkserver",
        monitor_interval=0.1,
    )
    return elastic_launch(config, one_rank)(str(run), settings)


def one_rank(run: str, settings: dict[str, Any]) -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with kernels.using("torch"):  # loading compiled ones would take longer than the rest
        return restarts.main(run, **settings)


@pytest.fixture(scope="module", autouse=True)
def environment() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its digest."""
    said = launched(tmp_path_factory.mktemp("undisturbed") / "run", steps=STEPS)
    assert all(words.startswith("steps 0 to") for words in said.values())
    (digest,) = {digest_of(words) for words in said.values()}
    return digest


def digest_of(words: str) -> str:
    return words.rpartition(" ")[2]


def test_a_killed_rank_costs_the_steps_since_the_checkpoint_and_no_bit(
    tmp_path: Path, undisturbed: str
) -> None:
    killed = launched(tmp_path / "run", steps=STEPS, die_at=47)
    assert all(words.startswith("steps 40 to") for words in killed.values())
    assert {digest_of(words) for words in killed.values()} == {undisturbed}


def test_a_store_that_outlives_a_restart_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(SystemExit, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        restarts.main(str(tmp_path))


# -- two nodes, each a torchrun in processes of its own ---------------------------------------------------


def saved(run: Path) -> int:
    """The step of the last whole checkpoint, 0 before the first."""
    folder = restarts.last_checkpoint(run)
    return 0 if folder is None else int(folder.name.removeprefix("step-"))


def begins(node: Node) -> list[int]:
    """With which step each generation of the node's worker began."""
    return [int(step) for step in re.findall(r"begins with step (\d+)", node.log)]


def until(what: Callable[[], bool], nodes: Nodes, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "\n".join(node.log[-3000:] for node in nodes.all)
        time.sleep(0.02)


@pytest.mark.nightly
def test_workers_and_nodes_that_go_cost_no_bit(tmp_path: Path, undisturbed: str) -> None:
    run = tmp_path / "run"
    with Nodes(tmp_path, [SCRIPT, str(run), "--steps", str(STEPS)], "2") as nodes:
        first, second = nodes.start(), nodes.start()
        until(lambda: saved(run) >= 10, nodes)
        second.kill_worker()
        until(lambda: len(begins(first)) == 2 and saved(run) >= 30, nodes)
        first.kill()  # rank 0, with the store of this generation
        third = nodes.start()
        until(lambda: len(begins(second)) == 3 and saved(run) >= 50, nodes)
        third.give_notice()
        until(lambda: not third.is_running, nodes)
        at_notice = saved(run)
        fourth = nodes.start()
        assert wait_for([second, fourth], 120.0), second.log + fourth.log
    assert 10 <= begins(second)[1] < 30 <= begins(second)[2] < 50
    assert begins(third) == begins(second)[2:3], "both began alike"
    assert begins(fourth) == begins(second)[3:] == [at_notice], "nothing was lost by the one with a notice"
    assert f"digest {undisturbed}\n" in second.log
    assert f"digest {undisturbed}\n" in fourth.log


@pytest.mark.nightly
def test_one_that_joins_late_goes_on_with_the_others(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Nodes(tmp_path, [SCRIPT, str(run), "--steps", "100000"], "1:2") as nodes:
        first = nodes.start()
        until(lambda: saved(run) >= 10, nodes)
        second = nodes.start()
        until(lambda: begins(second) != [], nodes)
        until(lambda: saved(run) > begins(second)[0], nodes)
    assert "rank 0 of 1 begins with step 0" in first.log
    assert "of 2 begins with step" in second.log
    assert begins(second) == begins(first)[1:]
    assert begins(second)[0] >= 10
