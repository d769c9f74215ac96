"""torchrun's restarts: a rank is killed, all are started again and end with the bits of an undisturbed run.

By torchrun's own agent, on ranks that are forked from a process which has torch loaded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import multiproc.harness  # noqa: F401  # tells the fork server what to load
from gradsieve import kernels

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import restarts


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
        return restarts.main(run, steps=8, save_every=3, **settings)


def digest(words: str) -> str:
    return words.rpartition(" ")[2]


def test_a_killed_rank_costs_the_steps_since_the_checkpoint_and_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    clean = launched(tmp_path / "clean")
    killed = launched(tmp_path / "killed", die_at=7)
    assert all(words.startswith("steps 0 to") for words in clean.values())
    assert all(words.startswith("steps 6 to") for words in killed.values())
    assert {digest(words) for words in (*clean.values(), *killed.values())} == {digest(clean[0])}
