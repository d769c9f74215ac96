"""The judge of chaos sees everything that can go wrong; schedules are data. Nothing here runs a rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gradsieve.lab.chaos.judge import HARMLESS, NAMED, judge, summary
from gradsieve.lab.chaos.kinds import KINDS
from gradsieve.lab.chaos.schedule import Chance, schedule
from gradsieve.lab.faults.fleet import Ending
from gradsieve.lab.faults.trained import DONE, FAILED, PEER_FAILED

CLEAN = {step: [[10 * step, 100 * step + rank] for rank in range(3)] for step in range(9)}
DEATH = Chance(0, "stripes", "SIGKILL", 1, 2, 0, 0.0, 0)


def ended(rank: int, error: str, seconds: float, said: str) -> dict[str, Any]:
    return {
        "error": error,
        "said": said,
        "at": 100.0 + seconds,
        "ranks": [1],
        "kept": True,
        "threads": [],
        "connections": 0,
    }


def endings(kind: str) -> list[Ending]:
    """As they must be, for rank 1 as victim at step 2 after a checkpoint of step 0."""
    out = []
    for rank in range(3):
        steps = {str(step): CLEAN[step][rank] for step in (0, 1, 2)}
        messages = {"step": {"step": 2, "noted": steps, "waiting": 2.0}}
        error, code, seconds, said = "PeerError", PEER_FAILED, 0.1, "AllGather in step 2 failed"
        if kind == "SIGSTOP":
            seconds = 3.2
        if kind in ("flipped", "full disk"):
            error, code, said = "Malformed", FAILED, "step 2: No space left on device"
        if kind == "short SIGSTOP":
            error, code, said = "", DONE, ""
        messages["ended"] = ended(rank, error, seconds, said)
        if rank == 1:
            messages["fired"] = {"at": 100.0, "op": "AllGather", "step": 2}
            if kind == "SIGKILL":
                code = -9
                del messages["ended"]
            if kind == "memory cap":
                code = FAILED
        out.append(Ending(code, messages))
    return out


def line(kind: str, all_endings: list[Ending]) -> Any:
    return judge(replace(DEATH, kind=kind), 1, all_endings, CLEAN, 0, 1)


@pytest.mark.parametrize(
    "kind", ["SIGKILL", "SIGSTOP", "short SIGSTOP", "flipped", "full disk", "memory cap"]
)
def test_what_must_be_is_right(kind: str) -> None:
    found = line(kind, endings(kind))
    assert found.outcome == (HARMLESS if kind == "short SIGSTOP" else NAMED)
    if kind != "short SIGSTOP":
        assert found.lost_steps == 1
        assert found.lost_mass == pytest.approx(12**0.5), "what waited on three ranks"


@pytest.mark.parametrize(
    ("delay", "kept_at", "outcome"),
    [(0.01, 2, HARMLESS), (0.01, 1, "no error of gradsieve's"), (0.0, 2, "no error of gradsieve's")],
)
def test_a_death_after_the_last_save_has_nobody_to_name_it(delay: float, kept_at: int, outcome: str) -> None:
    """Found with seed 2 by fault 137: the end of a rank that had saved its last step, as the others had."""
    all_endings = endings("SIGKILL")
    for each in (all_endings[0], all_endings[2]):
        each.exit_code = DONE
        each.messages["ended"] |= {"error": "", "said": ""}
    late = replace(DEATH, delay=delay)
    assert outcome in judge(late, 1, all_endings, CLEAN, 0, kept_at).outcome


def change(rank: int, **told: Any) -> Callable[[list[Ending]], None]:
    return lambda all_endings: all_endings[rank].messages["ended"].update(told)


def exits(rank: int, code: int | None) -> Callable[[list[Ending]], None]:
    return lambda all_endings: setattr(all_endings[rank], "exit_code", code)


def spoil(rank: int) -> Callable[[list[Ending]], None]:
    return lambda all_endings: all_endings[rank].messages["step"]["noted"].update({"2": [99, 202]})


@pytest.mark.parametrize(
    ("kind", "breach", "seen"),
    [
        ("SIGKILL", lambda e: e[1].messages.pop("fired"), "the fault did not happen"),
        ("SIGKILL", change(2, at=106.5), "took 6.5 s, and 6 are allowed"),
        ("SIGKILL", exits(0, None), "rank 0 hung"),
        ("SIGKILL", exits(1, 0), "exit code 0, not -9"),
        ("SIGKILL", change(0, ranks=[2]), "rank 0: blames [2]"),
        ("SIGKILL", change(0, error="", said=""), "rank 0: exit code 10, no error"),
        ("SIGKILL", change(0, said="a peer has died"), "names no step"),
        ("SIGKILL", change(0, kept=False), "changed something"),
        ("SIGKILL", change(0, connections=1), "1 connections"),
        ("SIGSTOP", change(0, at=103.6), "took 3.6 s, and 3.5 are allowed"),
        ("SIGSTOP", exits(1, 0), "rank 1: ended with code 0"),
        ("short SIGSTOP", lambda e: (change(0, error="PeerError")(e), exits(0, 10)(e)), "need not"),
        ("flipped", spoil(2), "silent loss: rank 2 took step 2"),
        ("flipped", change(0, error="IndexError"), "raised IndexError"),
        ("full disk", change(0, said="step 2: no"), "does not name the disk"),
        ("memory cap", exits(1, 0), "exit code 0, not 11"),
    ],
)
def test_every_way_to_get_it_wrong_is_seen(kind: str, breach: Callable[..., Any], seen: str) -> None:
    all_endings = copy.deepcopy(endings(kind))
    breach(all_endings)
    found = line(kind, all_endings)
    assert seen in found.outcome
    total = summary([found], {}, 1.0)
    assert total["wrong"] == 1
    assert total["silent"] == ("silent" in seen)
    assert total["hung"] == ("hung" in seen)


def test_a_schedule_is_data() -> None:
    short, long = (schedule(1, faults, [*KINDS]) for faults in (30, 90))
    assert long[:30] == short
    assert {chance.kind for chance in short} == set(KINDS)
    assert schedule(2, 30, [*KINDS]) != short
