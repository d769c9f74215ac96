"""`bench overhead`: whose time it counts, over what, and that its ranks take real steps."""

from __future__ import annotations

import time

import pytest
import torch

from gradsieve.comm.ops import AllReduce
from gradsieve.types import Program
from gradsieve_tools.bench import overhead
from gradsieve_tools.bench.common.clock import Clock
from gradsieve_tools.bench.overhead import Case, Rank, step


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
