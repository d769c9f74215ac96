"""`bench overhead`: whose time it counts, over what, and that its ranks take real steps."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from gradsieve.comm.ops import AllReduce
from gradsieve.types import Program
from gradsieve_tools.bench import overhead
from gradsieve_tools.bench.common.clock import Clock
from gradsieve_tools.bench.overhead import Case, Rank, kernels_here, step
from gradsieve_tools.cli.main import main


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A processor's clock that goes on only when it is set."""
    now = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    return now


def test_only_a_program_s_own_work_is_counted(clock: list[float]) -> None:
    def program() -> Program[str]:
        clock[0] += 1.0
        reply = yield AllReduce(torch.zeros(1))
        clock[0] += 2.0
        return f"sum {float(reply):g}"

    counted = Clock()
    running = counted.program(program())
    op = next(running)
    assert isinstance(op, AllReduce)
    clock[0] += 100.0  # the others
    with pytest.raises(StopIteration) as end:
        running.send(torch.ones(1))
    assert end.value.value == "sum 1"
    assert counted.seconds == 3.0
    assert counted.call(lambda: clock.__setitem__(0, clock[0] + 4.0)) is None
    assert counted.seconds == 7.0


@pytest.mark.parametrize("exchange", ["steps", "gradients"])
@torch.no_grad()
def test_the_ranks_take_real_steps(exchange: overhead.ExchangeOf) -> None:
    """What is sent arrives on every rank, at about the density asked for, and all stages are timed."""
    case = Case("exdyna", exchange, 3, 60_000, 0.01)
    ranks = [Rank(case, rank) for rank in range(case.world)]
    noise = torch.randn(200_000)
    for _ in range(8):
        for rank in ranks:
            rank.train(noise)
        works = step(ranks)
    assert {rank.pipeline.step for rank in ranks} == {8}
    sent = [rank.pipeline.outcomes[0].update for rank in ranks]
    assert all(torch.equal(update.values, sent[0].values) for update in sent)
    assert 0.005 < sent[0].count / sent[0].numel < 0.02
    expected = {"accumulate", "select", "exchange", "apply", "commit"}
    for work in works:
        assert set(work.stages) == expected | ({"check"} if exchange == "steps" else set())
        assert work.seconds > 0.0


def test_the_command_prints_two_tables_and_writes_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overhead, "WARM", 1)
    monkeypatch.setattr(overhead, "ROUNDS", 1)
    path = tmp_path / "overhead.json"
    arguments = ["--params", "1e4", "--world", "2", "--density", "0.01", "--json", str(path)]
    assert main(["bench", "overhead", *arguments]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.split()[:6] == ["scheme", "exchange", "kernel", "ours_ms", "bare_ms", "ratio"]
    assert second.split()[:4] == ["scheme", "exchange", "kernel", "accumulate"]
    result = json.loads(path.read_text())
    kinds = [(row["exchange"], row["kernel"]) for row in result["rows"]]
    assert kinds == [(exchange, kernel) for exchange in ("steps", "gradients") for kernel in kernels_here()]
    assert result["config"] == {"schemes": ["exdyna"], "world": 2, "params": 10_000, "density": 0.01}
