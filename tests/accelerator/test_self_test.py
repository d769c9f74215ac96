"""`gradsieve doctor --self-test`, whole: on the CPU and on the fake device, and with a fault of each kind."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from accelerator.planted_rank import FAULTS, PLANTED
from gradsieve_tools.cli.main import main
from gradsieve_tools.doctor.self_test import pair, run

SMALL = run.Sizes(lengths=(7, 257, 1000), elements=1 << 20, steps=6, stretch=10, budget_steps=40)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "Sizes", lambda: SMALL)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # ranks find what we find
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def device(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The fake one, as others' devices come: torch loads it from an entry point of an installed package."""
    info = tmp_path / "fake_device-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-device\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nfake = fake_device:load\n")
    (tmp_path / "fake_device.py").write_text(
        f"def load():\n    from accelerator import device\n    device.load({str(library)!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}")
    return "fake"


def assert_fine(verdicts: dict[str, str], written: str) -> None:
    """On a busy machine a budget may take longer to find than these few steps."""
    assert verdicts.pop("budget") in ("ok", "not possible"), written
    assert verdicts.pop("sanitizer") == "not possible"
    assert verdicts == dict.fromkeys(verdicts, "ok"), written
    assert len(verdicts) == len(run.CHECKS) - 2


def self_test(*arguments: str) -> tuple[int, dict[str, str], str]:
    """Exit code, verdicts, and the file."""
    code = main(["doctor", "--self-test", *arguments])
    written = Path("gradsieve-self-test.json").read_text()
    return code, {row["check"]: row["verdict"] for row in json.loads(written)["rows"]}, written


@pytest.mark.nightly
def test_the_cpu_passes_and_nothing_private_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    code, verdicts, written = self_test("--device", "cpu")
    out = capsys.readouterr().out
    assert_fine(verdicts, written)
    assert code == 0
    assert "all is well" in out
    assert max(map(len, out.splitlines())) <= 100
    assert not [each for each in (socket.gethostname(), str(Path.home()), str(Path.cwd())) if each in written]
    result = json.loads(written)
    assert result["device"]["type"] == "cpu"
    assert result["versions"]["torch"]


@pytest.mark.nightly
def test_a_device_from_outside_passes(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is also the one that is taken where nobody names one."""
    code, verdicts, written = self_test()
    assert_fine(verdicts, written)
    assert code == 0
    assert "device: fake; kernels by torch" in capsys.readouterr().out
    training = next(row for row in json.loads(written)["rows"] if row["check"] == "training")
    assert "with the bits of the CPU" in training["found"]


OTHERS = [pytest.param(each, marks=pytest.mark.nightly) for each in FAULTS if each != "a bit of a weight"]


@pytest.mark.parametrize("fault", ["a bit of a weight", *OTHERS])
def test_a_planted_fault_is_found_by_its_check_alone(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among two: whole runs take half a minute."""
    own = FAULTS[fault][0]
    another = "training" if own == "kernels" else "kernels"
    monkeypatch.setattr(run, "CHECKS", {name: run.CHECKS[name] for name in (own, another)})
    monkeypatch.setattr(pair, "MODULE", "accelerator.planted_rank")
    monkeypatch.setenv(PLANTED, fault)
    code, verdicts, written = self_test("--device", "cpu")
    assert [name for name, verdict in verdicts.items() if verdict == "failed"] == [own], written
    assert code == 1
    assert "1 of 2 checks failed" in capsys.readouterr().out


def test_a_fault_on_a_device_from_outside_is_found(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: the whole self-test runs, on a device that is built first."""
    monkeypatch.setattr(pair, "MODULE", "accelerator.planted_rank")
    monkeypatch.setenv(PLANTED, "a bit of a weight")
    code, verdicts, written = self_test("--device", device)
    assert [name for name, verdict in verdicts.items() if verdict == "failed"] == ["training"], written
    assert code == 1


@pytest.mark.parametrize(
    ("name", "said"), [("nosuch", "device type"), ("cuda", "there is no cuda device here")]
)
def test_a_device_that_is_not_there_ends_with_2(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--self-test", "--device", name]) == 2
    err = capsys.readouterr().err
    assert f"no self-test on {name}" in err
    assert said in err
    assert not Path("gradsieve-self-test.json").exists()
