"""The examples run, as a user runs them: by torchrun, in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FASHION_MNIST = ROOT / "examples" / "fashion_mnist.py"
DATA = Path("/usr/share/datasets/fashion-mnist")


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=240, env=environment, check=False
    )


@pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is missing: apt-get install dataset-fashion-mnist")
def test_fashion_mnist_trains_and_reports() -> None:
    """Slow: torchrun loads torch in three new processes, which train twice, with and without gradsieve."""
    ended = torchrun(str(FASHION_MNIST), "--steps", "30")
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"accuracy +([\d.]+) with density ([\d.]+)", ended.stdout)
    assert found, ended.stdout
    assert float(found[1]) > 0.3  # of ten classes, after a few steps
    assert 0.002 < float(found[2]) < 0.03  # the threshold is still settling
    found = re.search(r"bytes sent +([\d,]+) a step and rank; dense ([\d,]+)", ended.stdout)
    assert found, ended.stdout
    assert int(found[1].replace(",", "")) < int(found[2].replace(",", "")) / 10
    assert "loopback, where plain DDP is as good" in ended.stdout
    assert "times dense's speed" not in ended.stdout, "no race where there is no network"


@pytest.mark.nightly
def test_gpt2_learns_with_trainer_and_says_what_it_took(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    example = ROOT / "examples" / "gpt2_trainer.py"
    ended = torchrun(str(example), "--steps", "12", "--every", "2", "--folder", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    found = re.findall(r"step \d+: loss ([\d.]+), ([\d.]+) bits", ended.stdout)
    losses, bits = ([float(each[i]) for each in found] for i in (0, 1))
    assert losses[-1] < losses[0] - 0.5, ended.stdout
    assert 0.0 < bits[-1] < 1.5
    found = re.findall(r"loss on unseen files ([\d.]+)", ended.stdout)
    assert float(found[0]) < losses[0]


@pytest.mark.nightly
def test_two_sites_train_one_model_and_say_what_it_took() -> None:
    example = ROOT / "examples" / "two_sites.py"
    ended = torchrun(str(example), "--steps", "32", "--every", "8", "--overlap", "3", "--step-ms", "1")
    assert ended.returncode == 0, ended.stderr
    for site in (0, 1):
        losses = [float(each) for each in re.findall(rf"site {site}, step \d+: loss ([\d.]+)", ended.stdout)]
        assert losses[-1] < losses[0] - 0.5, ended.stdout
    assert re.search(r"a step +\d+ ms; alone \d+, dense \d+", ended.stdout)
    found = re.search(r"bits +([\d.]+) a parameter and step; dense 32", ended.stdout)
    assert found, ended.stdout
    assert 0.0 < float(found[1]) < 0.2


def test_examples_stay_short() -> None:
    for path in (ROOT / "examples").rglob("*.py"):
        most = 220 if path.name == "one_file.py" else 100
        assert len(path.read_text().splitlines()) <= most, path
