"""A peer that dies or stalls in the middle of a step: survivors say so in time and keep nothing of it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from gradsieve import ConfigError, PeerError
from gradsieve.comm import engine as engine_module
from gradsieve.comm.engine import Engine
from gradsieve.comm.failures import Watch
from gradsieve.comm.ops import AllGather
from gradsieve.hooks import hook_of
from gradsieve.types import Program
from multiproc.harness import Answer, Ranks
from multiproc.training import Plan, Run, Seen, differing, snapshot

WORLD, VICTIM, STEP = 3, 1, 5
GROUP_TIMEOUT = 3.0


@dataclass
class Survivor:
    said: str | None
    kind: str
    """Of the exception."""
    seconds: float
    """From the beginning of the step that failed."""
    step: int
    changed: list[str]
    """Since the beginning of that step."""


def leave(number: int) -> None:
    """Exit with a code, or by a signal if negative."""
    if number < 0:
        os.kill(os.getpid(), -number)
        time.sleep(60)
    os._exit(number)


def in_a_hook(run: Run, end: Callable[[], None]) -> Any:
    """Between the first bucket and the second."""
    comm_hook = hook_of(run.ddp)
    assert comm_hook is not None
    assert comm_hook.hand_over is not None
    usual = comm_hook.hand_over

    def dying(bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 1 and run.sync.pipeline.step == STEP:
            end()
        return usual(bucket)

    return mock.patch.object(comm_hook, "hand_over", dying)


def before_an_op(run: Run, end: Callable[[], None]) -> Any:
    """Where the second collective of the step would be issued."""
    usual, issued = Engine.perform, []

    def dying(self: Engine, op: Any) -> torch.Tensor:
        if run.sync.pipeline.step == STEP:
            issued.append(op)
            if len(issued) == 2:
                end()
        return usual(self, op)

    return mock.patch.object(Engine, "perform", dying)


def before_the_optimizer(run: Run, end: Callable[[], None]) -> Any:
    """After an exchange: the others commit that step, and fail in the next one."""
    usual = run.apply

    def dying() -> None:
        if run.sync.pipeline.step == STEP:
            end()
        usual()

    return mock.patch.object(run, "apply", dying)


def train_with_an_end(rank: int, plan: Plan, where: Callable[..., Any], number: int) -> Survivor:
    run = Run(rank, plan)

    def end() -> None:
        if rank == VICTIM:
            leave(number)

    with where(run, end):
        return watch(run)


def watch(run: Run) -> Survivor:
    for step in range(STEP + 3):
        before, start = snapshot(run), time.monotonic()
        try:
            run.step(run.plan.gradients(step, run.rank))
        except Exception as error:
            seconds = time.monotonic() - start
            changed = differing(before, snapshot(run))
            return Survivor(str(error), type(error).__name__, seconds, run.sync.pipeline.step, changed)
    return Survivor(None, "", 0.0, run.sync.pipeline.step, [])


def check_survivors(survivors: dict[int, Survivor], within: float) -> None:
    for rank, survivor in survivors.items():
        assert survivor.said is not None, f"rank {rank} noticed nothing"
        assert survivor.kind in ("PeerError", "RuntimeError")
        words = rf"On rank {rank} \w+ of \w+.* for unit \d+ of \d+ in step {survivor.step} failed"
        assert re.search(words, survivor.said), survivor.said
        assert "PeerError" in survivor.said or survivor.kind == "PeerError"
        assert re.search(rf"rank {VICTIM} (died|lives, but has not come)", survivor.said), survivor.said
        assert survivor.changed == [], f"rank {rank} changed {survivor.changed}"
        assert survivor.seconds < within, f"rank {rank} took {survivor.seconds:.1f} s"


def ended(answers: list[Answer]) -> tuple[dict[int, Survivor], dict[int, int | None]]:
    """Those that live, and the exit codes of those that do not."""
    assert not any(answer.error for answer in answers), [answer.error for answer in answers]
    alive = {rank: answer.value for rank, answer in enumerate(answers) if answer.is_good}
    return alive, {rank: a.exit_code for rank, a in enumerate(answers) if a.exit_code is not None}


@pytest.mark.parametrize(
    ("scheme", "where", "number"),
    [
        *[(scheme, in_a_hook, 17) for scheme in ("dense", "spardl")],
        ("oktopk", before_an_op, -signal.SIGSEGV),
        ("exdyna", before_the_optimizer, -signal.SIGKILL),
    ],
)
def test_a_death_is_noticed_and_the_step_rolled_back(
    scheme: str, where: Callable[..., Any], number: int
) -> None:
    ranks = Ranks(WORLD)
    try:
        answers = ranks.outcomes(
            train_with_an_end, Plan(scheme), where, number, group_timeout=GROUP_TIMEOUT, timeout=30.0
        )
    finally:
        ranks.kill()
    survivors, codes = ended(answers)
    assert codes == {VICTIM: number}
    assert sorted(survivors) == [0, 2]
    check_survivors(survivors, within=GROUP_TIMEOUT + 1.5)
    assert all(survivor.step == STEP for survivor in survivors.values())


def train_with_a_stall(rank: int, plan: Plan, seconds: float) -> tuple[Survivor, Seen]:
    run = Run(rank, plan)

    def end() -> None:
        if rank == VICTIM:
            time.sleep(seconds)

    with in_a_hook(run, end):
        survivor = watch(run)
    return survivor, run.report()


def test_a_stall_beyond_the_time_out_is_an_error_in_time() -> None:
    ranks = Ranks(WORLD)
    try:
        answers = ranks.outcomes(train_with_a_stall, Plan(), 6.0, group_timeout=2.0, timeout=30.0)
    finally:
        ranks.kill()
    outcomes, codes = ended(answers)
    assert codes == {}
    survivors = {rank: outcome[0] for rank, outcome in outcomes.items()}
    assert survivors.pop(VICTIM).said is not None, "the late rank finds nobody and says so, too"
    check_survivors(survivors, within=3.5)


def flush_without_a_peer(rank: int, plan: Plan) -> tuple[str, list[str]]:
    """What flush() says, and what it changed."""
    run = Run(rank, plan).train()
    if rank == VICTIM:
        leave(17)
    before = snapshot(run)
    with pytest.raises(PeerError) as error:
        run.sync.flush()
    return str(error.value), differing(before, snapshot(run))


def test_a_flush_that_fails_keeps_the_residuals() -> None:
    ranks = Ranks(WORLD)
    try:
        answers = ranks.outcomes(flush_without_a_peer, Plan(), group_timeout=GROUP_TIMEOUT)
    finally:
        ranks.kill()
    survivors, codes = ended(answers)
    assert codes == {VICTIM: 17}
    for said, changed in survivors.values():
        assert re.search(r"for flush after step \d+ failed", said), said
        assert f"rank {VICTIM} died" in said
        assert changed == []


def fails_alone(rank: int, error: Exception) -> list[tuple[str, str, tuple[int, ...]]]:
    """What a rank raises when the victim cannot make room for a reply, and when it then asks once more."""
    engine, seen = Engine(), []
    usual, cpu = engine_module._empty, torch.device("cpu")
    engine.run(gathered(), "the beginning", cpu)  # all ranks have connected

    def lacking(*args: Any) -> torch.Tensor:
        if rank == VICTIM:
            raise error
        return usual(*args)

    def late(watch: Watch, *found: Any) -> None:
        """The thread that tells the others comes when the next op has already been asked for."""
        time.sleep(0.3 if rank == VICTIM else 0.0)
        diagnose(watch, *found)

    diagnose = Watch._diagnose
    for empty in (lacking, usual):
        with mock.patch.object(engine_module, "_empty", empty), mock.patch.object(Watch, "_diagnose", late):
            raised = engine.submit(gathered(), "unit 0 of 1 in step 5", cpu).exception()
        seen.append((type(raised).__name__, str(raised), getattr(raised, "ranks", ())))
    engine.close()
    return seen


def gathered() -> Program[torch.Tensor]:
    return (yield AllGather(torch.zeros(3)))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("a scheme's own"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_one_rank_is_named_on_all_as_what_it_is(error: Exception) -> None:
    """Not as a broken network, and at once: the time-out is far longer."""
    with Ranks(WORLD) as ranks:
        answers = ranks.outcomes(fails_alone, error, group_timeout=60.0, timeout=40.0)
    what = f"{type(error).__name__}: {error}"
    for rank, answer in enumerate(answers):
        (kind, said, blamed), (_, again, _) = answer.value
        if rank == VICTIM:
            assert f"{kind}: {said}" == what
            assert f"rank {VICTIM} (this one) gave up: {what}" in again
        else:
            assert (kind, blamed) == ("PeerError", (VICTIM,)), said
            assert said.startswith(f"rank {VICTIM} gave up: {what}. On rank {rank} AllGather"), said


def closed(rank: int) -> list[str]:
    run, said = Run(rank, Plan()).train(), []
    run.sync.close()
    for call in (run.sync.flush, run.sync.verify, run.sync.state_dict):
        with pytest.raises(ConfigError) as error:
            call()
        said.append(str(error.value))
    return said


def test_calls_after_close_say_so(two: Ranks) -> None:
    for said in two.run(closed):
        assert all("the sync is closed" in line for line in said), said
