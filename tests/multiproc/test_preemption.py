"""A signal to one rank, at whatever moment: all ranks learn of it after the same step, and can save there."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.errors import ConfigError
from gradsieve.sync import GradientSync
from multiproc.conftest import Pool
from multiproc.harness import Ranks
from multiproc.models import batch
from multiproc.sharded import Training
from repeatable import repeatable

STEPS, AT = 16, 5
POINTS = ("begin", "forward", "backward", "gradients", "step", "end")
"""Of a step, at which a signal can come."""
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "stripes": ({"bits": 1.0}, 2),
    "exdyna": ({"density": 0.05}, 2),
    "gradients": ({"density": 0.05, "exchange": gradsieve.Gradients()}, 2),
    "every": ({"bits": 1.0, "exchange": gradsieve.Steps(every=3)}, 5),
    "late": ({"bits": 1.0, "exchange": gradsieve.Steps(every=4, overlap=3)}, 8),
    "plain": ({"bits": 1.0}, 2),
}
"""Settings, and within how many steps all ranks know."""


class Run:
    """One rank's, which looks at `is_preempted` at the beginning of every step."""

    def __init__(self, rank: int, kind: str) -> None:
        self.rank, self.kind = rank, kind
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 10))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        settings = repeatable(KINDS[kind][0])
        self.sync: Any
        if kind == "plain":
            self.wrapped: nn.Module = self.model
            self.sync = GradientSync(self.model.named_parameters(), self.optimizer, **settings)
        else:
            self.wrapped = DistributedDataParallel(self.model)
            self.sync = gradsieve.attach(self.wrapped, self.optimizer, **settings)
        self.sync.heed_preemption([signal.SIGTERM])

    def step(self, step: int, at: Callable[[str], None] = lambda point: None) -> None:
        at("begin")
        inputs, labels = batch(step, self.rank)
        self.optimizer.zero_grad()
        hook = self.model[1].register_forward_hook(lambda *_: at("forward"))
        loss = nn.functional.cross_entropy(self.wrapped(inputs), labels % 10)
        hook.remove()
        loss.register_hook(lambda _: at("backward"))
        loss.backward()
        if self.kind == "plain":
            self.sync.reduce()
        at("gradients")
        hook = self.optimizer.register_step_post_hook(lambda *_: at("step"))
        self.optimizer.step()
        hook.remove()
        if self.kind == "late" and self.rank == 0:
            self.sync.state_dict()  # takes over what is under way, on this rank alone
        at("end")

    def first_seen(self, at: Callable[[int, str], object]) -> int:
        """The step before which a notice was seen; all ranks go on, so that unlike answers end nothing."""
        seen = []
        for step in range(STEPS):
            if self.sync.is_preempted:
                seen.append(step)
            self.step(step, lambda point, step=step: at(step, point))  # type: ignore[misc]
        self.sync.close()
        return seen[0] if seen else -1


def signal_if(now: bool) -> None:
    if now:
        signal.raise_signal(signal.SIGTERM)


def at_points(rank: int, kind: str) -> list[int]:
    """Of a signal to one rank at each of the points."""
    seen = []
    for number, point in enumerate(POINTS):
        chosen = (AT, point) if rank == number % 3 else None
        seen.append(Run(rank, kind).first_seen(lambda *now, chosen=chosen: signal_if(now == chosen)))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_learn_of_it_after_the_same_step(pool: Pool, kind: str) -> None:
    seen = pool(3).run(at_points, kind)
    assert seen[0] == seen[1] == seen[2]
    assert all(AT < step <= AT + KINDS[kind][1] for step in seen[0]), seen[0]


def at_odd_times(rank: int, kind: str) -> list[int]:
    """Of a signal from outside, to one rank or to all, as torchrun gives it."""
    seen = []
    for number in range(6):
        odd = random.Random(10 * number + rank)
        run = Run(rank, kind)
        timer = threading.Timer(odd.uniform(0.001, 0.04), os.kill, (os.getpid(), signal.SIGTERM))

        def begin(step: int, point: str, timer: threading.Timer = timer, number: int = number) -> None:
            if (step, point) == (2, "begin") and number in (rank, 3, 4, 5):
                timer.start()
            elif step > 2:
                time.sleep(0.002)

        seen.append(run.first_seen(begin))
    return seen


@pytest.mark.parametrize("kind", ["stripes", "late"])
def test_whenever_it_comes_and_to_however_many(pool: Pool, kind: str) -> None:
    seen = pool(3).run(at_odd_times, kind)
    assert seen[0] == seen[1] == seen[2]
    assert all(step > 2 for step in seen[0]), seen[0]


def resumed(rank: int, folder: str) -> tuple[int, bool]:
    """Saved with a second signal in the midst of it, read back, compared with an undisturbed run."""
    straight = Run(rank, "stripes")
    for step in range(STEPS):
        straight.step(step)
    expected = {key: each.clone() for key, each in straight.sync.state_dict().items()}
    straight.sync.close()
    run = Run(rank, "stripes")
    begin = 0
    for step in range(STEPS):
        if run.sync.is_preempted:
            run.optimizer.register_state_dict_pre_hook(lambda _: signal.raise_signal(signal.SIGTERM))
            run.sync.save(folder)
            begin = step
            break
        run.step(step, lambda point, step=step: signal_if((rank, step, point) == (2, AT, "forward")))  # type: ignore[misc]
    run.sync.close()
    again = Run(rank, "stripes")
    again.sync.load(folder)
    for step in range(begin, STEPS):
        again.step(step)
    ended = again.sync.state_dict()
    again.sync.close()
    return begin, all(torch.equal(each, ended[key]) for key, each in expected.items())


def test_what_is_saved_then_goes_on_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    assert pool(3).run(resumed, str(tmp_path)) == [(AT + 1, True)] * 3


def handlers(rank: int) -> list[Any]:
    before = signal.getsignal(signal.SIGTERM)
    run = Run(rank, "stripes")
    during = signal.getsignal(signal.SIGTERM)
    run.sync.close()
    quiet = GradientSync(run.model.named_parameters(), run.optimizer, scheme="noop")
    with pytest.raises(ConfigError, match="noop exchanges nothing"):
        quiet.heed_preemption()
    quiet.close()
    return [before == signal.getsignal(signal.SIGTERM), before == during]


def test_signals_do_what_they_did_once_the_sync_is_closed(pool: Pool) -> None:
    assert pool(3).run(handlers) == [[True, False]] * 3


def in_shards(rank: int, **settings: Any) -> list[int]:
    """Of a signal to each of two hosts with two shards, one after the other."""
    seen = []
    for chosen in range(4):
        training = Training(bits=1.0, **settings)
        training.sync.heed_preemption([signal.SIGTERM])
        first = -1
        for step in range(STEPS):
            if training.sync.is_preempted and first < 0:
                first = step
            signal_if((rank, step) == (chosen, AT))
            training.train(step, step + 1)
        seen.append(first)
        training.sync.close()
    return seen


@pytest.mark.parametrize(
    "settings",
    [{}, {"exchange": gradsieve.Steps(every=4, overlap=3)}],
    ids=["each step", "late"],
)
def test_shards_that_never_exchange_with_each_other_learn_of_it_together(
    four: Ranks, settings: dict[str, Any]
) -> None:
    seen = four.run(in_shards, **settings)
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert all(AT < step <= AT + (8 if settings else 2) for step in seen[0]), seen[0]
