"""examples/gpt under torchrun's own agent: a run that is killed and given notice has the curve of one that
is not, dense and sparse alike; and it trains on the text that the lab's held-out task has."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import multiproc.harness  # noqa: F401  # tells the fork server what to load
from gradsieve import kernels

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))

import train
from text import Text

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt"
STEPS, EVERY, DEATH, NOTICE = 24, 6, 9, 13
DRAW = Text.batch


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers")
    import prepare

    folder = tmp_path_factory.mktemp("text")
    files = {path.name: path.read_text() for path in sorted(Path(os.__file__).parent.glob("[a-d]*.py"))}
    prepare.write(files, folder, 300)
    return folder


def launched(text: Path, out: Path, sync: str, restarts: int = 0) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=restarts,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="forkserver",
        monitor_interval=0.1,
    )
    given = {"text": text, "out": out, "sync": sync, "size": "tiny", "steps": STEPS, "batch": 2}
    given |= {"warm-up": 5, "evaluate-every": EVERY}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"):
        elastic_launch(config, one_rank)([*words, "--bits", "0.75"], restarts > 0)


def one_rank(words: list[str], is_disturbed: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    args = train.parser("").parse_args(words)
    with kernels.using("torch"), contextlib.ExitStack() as stack:  # compiled ones take longer to load
        if is_disturbed:
            stack.enter_context(mock.patch.object(Text, "batch", deadly))
        train.main(args, train.sync_of(args))


def deadly(text: Text, seed: int, step: int, count: int) -> Any:
    """A batch as ever, but rank 1 dies in its first life and is given notice in its second one."""
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if os.environ["RANK"] == "1" and (life, step) in (("0", DEATH), ("1", NOTICE)):
        os.kill(os.getpid(), signal.SIGKILL if step == DEATH else signal.SIGTERM)
    return DRAW(text, seed, step, count)


def curve(out: Path) -> dict[int, set[float]]:
    """All losses that were told for a step."""
    found: dict[int, set[float]] = {}
    for line in (out / "log.jsonl").read_text().splitlines():
        told = json.loads(line)
        found.setdefault(told["step"], set()).add(told["loss"])
    return found


def model(out: Path) -> dict[str, Any]:
    return torch.load(out / f"step-{STEPS:06}" / "model.pt", weights_only=True)


@pytest.fixture(scope="module")
def curves(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Undisturbed runs."""
    made = {sync: tmp_path_factory.mktemp(sync) / "run" for sync in ("dense", "auto")}
    for sync, out in made.items():
        launched(text, out, sync)
    return made


@pytest.fixture(params=["dense", "auto"])
def undisturbed(request: Any, curves: dict[str, Path]) -> tuple[str, Path]:
    return request.param, curves[request.param]


def test_it_learns_and_writes(undisturbed: tuple[str, Path], text: Path, capsys: Any) -> None:
    _, out = undisturbed
    found = curve(out)
    assert list(found) == [6, 12, 18, 24]
    assert min(found[24]) < min(found[6]) - 0.3
    words = ["sample.py", "import o", "--text", str(text), "--out", str(out), "--tokens", "20"]
    with mock.patch.object(sys, "argv", words):
        runpy.run_path(str(EXAMPLE / "sample.py"))
    said = capsys.readouterr().out
    assert said.startswith("import o")
    assert len(said) > 20


def test_a_death_and_a_notice_leave_no_trace_in_the_curve(
    undisturbed: tuple[str, Path], text: Path, tmp_path: Path
) -> None:
    sync, out = undisturbed
    launched(text, tmp_path / "run", sync, restarts=2)
    found, wanted = curve(tmp_path / "run"), curve(out)
    (at_notice,) = found.keys() - wanted.keys()
    assert NOTICE < at_notice <= NOTICE + 3
    assert {step: found[step] for step in wanted} == wanted
    for name, value in model(out).items():
        assert torch.equal(value, model(tmp_path / "run")[name]), name
