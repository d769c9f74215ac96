"""Verdicts on the kill matrix see everything that a rank can get wrong; nothing here runs a rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from gradsieve.comm.engine import _timeout
from gradsieve.errors import ConfigError
from gradsieve_tools.faults.fleet import Ending
from gradsieve_tools.faults.injector import Injector
from gradsieve_tools.faults.kinds import KINDS, STOP, Fault
from gradsieve_tools.faults.trained import PEER_FAILED, Task
from gradsieve_tools.faults.verdicts import summary, verdict_of

TASK = Task("exdyna", 6, deadline=2.0, seed=1, store_port=0, case="case")
CLEAN = [10, 11, 12, 13]
DEATH, STALL = Fault("SIGKILL", 1, 2, 0), Fault(STOP, 1, 2, 0)


def survivor(rank: int, seconds: float) -> Ending:
    said = f"rank {rank}: AllGather of int32 (3,) for unit 0 of 1 in step 2 failed after 0.0 s: rank 1 died"
    fields = {"error": "PeerError", "said": said, "at": 100.0 + seconds, "ranks": [1], "kept": True}
    fields |= {"step": 2, "digests": CLEAN[:3], "threads": [], "connections": 0}
    return Ending(PEER_FAILED, {"ended": fields})


def endings(fault: Fault) -> list[Ending]:
    """As they must be."""
    seconds = 0.1 if fault.is_death else 2.8
    victim = Ending(KINDS[fault.kind], {"fired": {"at": 100.0}})
    if not fault.is_death:
        victim.exit_code, victim.messages["ended"] = PEER_FAILED, {"ranks": [1], "said": "given up"}
    return [survivor(0, seconds), victim, survivor(2, seconds)]


@pytest.mark.parametrize("fault", [DEATH, STALL])
def test_what_must_be_is_named(fault: Fault) -> None:
    line = verdict_of(fault, TASK, endings(fault), CLEAN, "AllGather")
    assert line.outcome == "named"
    assert line.detection_ms == pytest.approx(100.0 if fault.is_death else 2800.0)
    assert line.digest == f"{12:016x}"


def change(rank: int, **fields: Any) -> Callable[[list[Ending]], None]:
    return lambda all_endings: all_endings[rank].messages["ended"].update(fields)


def exits(rank: int, code: int | None) -> Callable[[list[Ending]], None]:
    return lambda all_endings: setattr(all_endings[rank], "exit_code", code)


@pytest.mark.parametrize(
    ("fault", "breach", "seen"),
    [
        (DEATH, lambda e: e[1].messages.pop("fired"), "the fault did not happen"),
        (DEATH, change(2, at=106.5), "took 6.5 s, and 6 are allowed"),
        (STALL, change(0, at=104.0), "took 4.0 s, and 3.5 are allowed"),
        (DEATH, exits(0, 0), "rank 0: exit code 0"),
        (DEATH, exits(2, None), "rank 2: hung"),
        (DEATH, exits(1, 0), "rank 1: exit code 0, not -9"),
        (STALL, exits(1, None), "rank 1: hung after it was continued"),
        (STALL, exits(1, 0), "rank 1: continued, it ended with code 0"),
        (DEATH, change(0, error="MismatchError"), "rank 0: raised MismatchError"),
        (DEATH, change(0, error=""), "rank 0: raised nothing"),
        (DEATH, change(2, ranks=[]), "rank 2: blames []"),
        (DEATH, change(2, ranks=[0, 1]), "rank 2: blames [0, 1]"),
        (DEATH, change(0, said="a peer has died"), "rank 0: names no op or step"),
        (DEATH, change(0, kept=False), "rank 0: the failed step changed something"),
        (DEATH, change(0, digests=[10, 11, 99]), "with another model"),
        (DEATH, change(0, threads=["gradsieve"]), "left ['gradsieve'] threads"),
        (DEATH, change(0, connections=2), "2 connections"),
    ],
)
def test_every_way_to_get_it_wrong_is_seen(fault: Fault, breach: Callable[..., Any], seen: str) -> None:
    changed = copy.deepcopy(endings(fault))
    breach(changed)
    assert seen in verdict_of(fault, TASK, changed, CLEAN, "AllGather").outcome


def test_times_of_stalls_are_counted_from_their_deadline() -> None:
    lines = [verdict_of(fault, TASK, endings(fault), CLEAN, "AllGather") for fault in (DEATH, STALL)]
    total = summary(lines, 1.0)
    assert (total["faults"], total["named"], total["hung"]) == (2, 2, 0)
    assert total["deaths_ms"]["p99"] == pytest.approx(100.0)
    assert total["stalls_beyond_deadline_ms"]["p99"] == pytest.approx(800.0)


@pytest.mark.parametrize(("step", "op", "fires"), [(1, 1, True), (1, 2, False), (2, 0, False)])
def test_a_fault_happens_before_its_op_and_nowhere_else(
    step: int, op: int, fires: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck: list[tuple[str, list[int]]] = []
    done: list[int] = []
    engine: Any = SimpleNamespace(perform=done.append)
    monkeypatch.setattr(
        "gradsieve_tools.faults.injector.strike", lambda kind: struck.append((kind, list(done)))
    )
    at = [0]
    injector = Injector(engine, lambda: at[0], Fault("abort", 0, step, op), lambda: None)
    for number in range(4):
        at[0] = number // 2
        engine.perform(number)
    assert struck == ([("abort", [0, 1, 2])] if fires else [])
    assert done == [0, 1, 2, 3]
    assert injector.ops == {0: ["int", "int"], 1: ["int", "int"]}


@pytest.mark.parametrize(("seconds", "is_fine"), [(0.0, False), (-1.0, False), (0.001, True), (1e9, True)])
def test_a_group_without_a_deadline_is_refused(seconds: float, is_fine: bool) -> None:
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=seconds)))
    group: Any = SimpleNamespace(_device_types=["cpu"], _get_backend=lambda _: backend)
    if is_fine:
        assert _timeout(group).total_seconds() == seconds
    else:
        with pytest.raises(ConfigError, match="every wait needs a deadline"):
            _timeout(group)
