"""Verdicts on chaos see everything that can go wrong; schedules are data. Nothing here runs a rank."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsieve.checkpoint import files
from gradsieve.checkpoint.fencing import FencingToken
from gradsieve.checkpoint.tensors import pieces
from gradsieve_tools.chaos.fleet import DONE, FAILED, PEER_FAILED, Ending
from gradsieve_tools.chaos.kinds import DEATHS, KINDS, Must
from gradsieve_tools.chaos.schedule import Chance, matrix, schedule
from gradsieve_tools.chaos.verdicts import HARMLESS, NAMED, Kept, read_back, summary, verdict_of
from gradsieve_tools.chaos.writes import OPERATIONS, tap

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


SAID = "AllGather of int32 (3,) for unit 0 of 1 in step 2 failed after 0.0 s"
UNDISTURBED = (Must.GO_ON, Must.SURVIVE, Must.NOTICE)
AFTER_A_DEADLINE = (Must.STALL, Must.CUT, Must.VANISH, Must.FENCED)
ERRORS = {
    **dict.fromkeys(UNDISTURBED, ("", DONE, "")),
    Must.DAMAGE: ("Malformed", FAILED, "step 2: a check failed"),
    Must.DISK: ("Malformed", FAILED, "step 2: No space left on device"),
    Must.DIVERGE: ("DivergenceError", FAILED, "step 2: ranks hold different states"),
    Must.DIFFERENT: ("MismatchError", FAILED, "ranks differ in the version of gradsieve"),
}


def endings(kind: str) -> list[Ending]:
    """As they must be, for rank 1 as victim at step 2 after a checkpoint of step 0."""
    out, must = [], KINDS[kind].must
    for rank in range(3):
        steps = {str(step): CLEAN[step][rank] for step in (0, 1, 2)}
        messages: dict[str, Any] = {"step": {"step": 2, "digests": steps, "residual": 2.0}}
        error, code, said = ERRORS.get(
            must,
            (
                "PeerError",
                PEER_FAILED,
                SAID,
            ),
        )
        messages["ended"] = ended(rank, error, 3.2 if must in AFTER_A_DEADLINE else 0.1, said)
        if must is Must.SURVIVE:
            messages["refused"] = {"said": "step 2: nothing was saved"}
        if must is Must.NOTICE:
            messages["left"] = messages["saved"] = {"step": 2}
        if rank == 1:
            messages["fired"] = {"at": 100.0, "op": "AllGather", "step": 2}
            if must in (Must.DEATH, Must.VANISH):
                code = DEATHS.get(kind, -9) or 0
                del messages["ended"]
            if must is Must.FAIL:
                code = FAILED
        out.append(Ending(code, messages))
    return out


def successors() -> list[Ending]:
    """From the checkpoint of step 1 on, to one of step 5."""
    steps = [{str(step): CLEAN[step][rank] for step in range(1, 6)} for rank in range(3)]
    return [Ending(DONE, {"step": {"step": 5, "digests": each}, "saved": {"step": 5}}) for each in steps]


def line(kind: str, all_endings: list[Ending], kept: Kept | None = None) -> Any:
    must = KINDS[kind].must
    others = [*all_endings[3:], *successors()[len(all_endings) - 3 :]] if must is Must.FENCED else []
    at = kept or Kept({Must.NOTICE: 2, Must.FENCED: 5}.get(must, 1))
    return verdict_of(replace(DEATH, kind=kind), 1, all_endings[:3], CLEAN, 0, at, others)


@pytest.mark.parametrize("kind", [*KINDS])
def test_what_must_be_is_right(kind: str) -> None:
    found, must = line(kind, endings(kind)), KINDS[kind].must
    assert found.outcome == (HARMLESS if must in UNDISTURBED else NAMED)
    assert summary([found], {}, 1.0)["read_back"] == 1
    if must not in (*UNDISTURBED, Must.FENCED):
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
    assert outcome in verdict_of(late, 1, all_endings, CLEAN, 0, Kept(kept_at)).outcome


def change(rank: int, **fields: Any) -> Callable[[list[Ending]], None]:
    return lambda all_endings: all_endings[rank].messages["ended"].update(fields)


def exits(rank: int, code: int | None) -> Callable[[list[Ending]], None]:
    return lambda all_endings: setattr(all_endings[rank], "exit_code", code)


def spoil(rank: int) -> Callable[[list[Ending]], None]:
    return lambda all_endings: all_endings[rank].messages["step"]["digests"].update({"2": [99, 202]})


def fails(rank: int) -> Callable[[list[Ending]], None]:
    return lambda e: (change(rank, error="PeerError")(e), exits(rank, PEER_FAILED)(e))  # type: ignore[func-returns-value]


def says(rank: int, event: str, **fields: Any) -> Callable[[list[Ending]], None]:
    return lambda all_endings: all_endings[rank].messages.update({event: fields})


def succeeds(breach: Callable[[list[Ending]], None]) -> Callable[[list[Ending]], None]:
    """The breach is one of the successors."""

    def add(all_endings: list[Ending]) -> None:
        later = successors()
        breach(later)
        all_endings += later

    return add


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
        ("SIGKILL", change(0, said="a peer has died in step 2"), "names no op"),
        ("SIGKILL", change(0, kept=False), "changed something"),
        ("SIGKILL", change(0, connections=1), "1 connections"),
        ("SIGSTOP", change(0, at=103.6), "took 3.6 s, and 3.5 are allowed"),
        ("SIGSTOP", exits(1, 0), "rank 1: ended with code 0"),
        ("short SIGSTOP", fails(0), "need not"),
        ("flipped", spoil(2), "silent loss: rank 2 took step 2"),
        ("flipped", change(0, error="IndexError"), "raised IndexError"),
        ("full disk", change(0, said="step 2: no"), "does not name the disk"),
        ("memory cap", exits(1, 0), "exit code 0, not 11"),
        ("slow processor", fails(2), "need not"),
        ("host gone", exits(1, 0), "exit code 0, not -9"),
        ("host gone", change(2, ranks=[0]), "rank 2: blames [0]"),
        ("healed partition", fails(1), "rank 1: failed, and need not"),
        ("partition healed too late", change(0, at=103.6), "took 3.6 s, and 3.5 are allowed"),
        ("store gone", fails(2), "need not"),
        ("store gone before SIGKILL", change(0, ranks=[]), "rank 0: blames []"),
        ("store reset", fails(0), "need not"),
        ("damaged sum", change(0, error="PeerError"), "raised PeerError"),
        ("damaged sum", spoil(2), "silent loss: rank 2 took step 2"),
        ("damaged sum", says(2, "saved", step=3), "step 3 was acknowledged"),
        ("SIGKILL in a shard", change(2, at=106.5), "took 6.5 s"),
        ("SIGKILL in a manifest", exits(1, 0), "exit code 0, not -9"),
        ("SIGKILL in a manifest", says(2, "saved", step=2), "acknowledged, and the folder holds step 1"),
        ("late waker", says(1, "saved", step=2), "its save returned"),
        ("late waker", exits(1, 0), "rank 1: ended with code 0"),
        ("late waker", succeeds(exits(2, 11)), "successors ended with [0, 0, 11]"),
        ("late waker", succeeds(spoil(2)), "silent loss: rank 2 took step 2"),
        ("late waker", succeeds(says(0, "saved", step=6)), "acknowledged, and the folder holds step 5"),
        ("slow disk", change(0, ranks=[]), "blames []"),
        ("refused save", lambda e: e[2].messages.pop("refused"), "rank 2: refused nothing"),
        ("refused save", spoil(0), "silent loss"),
        ("refused load", fails(1), "need not"),
        ("mixed releases", change(0, error="PeerError"), "raised PeerError"),
        ("mixed releases", exits(0, 0), "rank 0: began"),
        ("notice", says(2, "left", step=1), "rank 2: left after step 1, and step 2 was saved"),
        ("notice", fails(0), "need not"),
        ("clock ahead", spoil(1), "silent loss: rank 1"),
        ("clock behind", fails(0), "need not"),
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
    short, long = (schedule(1, faults, [*KINDS]) for faults in (40, 90))
    assert long[:40] == short
    assert {chance.kind for chance in short} == set(KINDS)
    assert schedule(2, 40, [*KINDS]) != short
    assert len(KINDS) >= 26
    assert all(chance.rank == KINDS[chance.kind].rank or KINDS[chance.kind].rank is None for chance in long)
    assert all(chance.op <= KINDS[chance.kind].last_op for chance in long)


def test_a_matrix_has_every_death_and_a_stop_of_every_rank_at_every_op() -> None:
    found = matrix({"stripes": 2, "exdyna": 3})
    places = {(chance.scheme, chance.op, chance.kind, chance.rank) for chance in found}
    assert len(found) == len(places) == (2 + 3) * 6 * 3
    assert {chance.kind for chance in found} == {*DEATHS, "SIGSTOP"}


@pytest.mark.parametrize(
    ("kept", "seen"),
    [
        (Kept(-1, "its SHA-256 is another"), "step 2 was acknowledged and cannot be read: its SHA-256"),
        (Kept(1), "step 2 was acknowledged, and the folder holds step 1"),
    ],
)
def test_a_checkpoint_that_was_acknowledged_and_is_not_there_is_seen(kept: Kept, seen: str) -> None:
    all_endings = endings("clock ahead")
    says(0, "saved", step=2)(all_endings)
    found = line("clock ahead", all_endings, kept)
    assert seen in found.outcome
    total = summary([found], {}, 1.0)
    assert (total["wrong"], total["read_back"]) == (1, 0)


def test_a_sum_that_was_damaged_and_saved_is_a_silent_loss() -> None:
    assert (
        "silent loss: replicas differed from step 2 on"
        in line("damaged sum", endings("damaged sum"), Kept(3)).outcome
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    token, written = FencingToken(1, 1), []
    for rank in range(3):
        content = pieces({"a": torch.full((5,), float(rank))}, 0)
        written.append(
            files.write(tmp_path, "x.part", content, lambda sha, rank=rank: files._file(rank, 0, token, sha))
        )
    listed = tuple(f"{size} {sha256.hex()}" for size, sha256 in written)
    text = files.as_text(files.Manifest(1, 1, 1, 3, 7, "Stripes", "00" * 32, True, "", listed))
    files.write_manifest(tmp_path, token, text, keeps_last=False)
    return tmp_path


def test_a_checkpoint_is_read_back_whole(saved: Path) -> None:
    assert read_back(saved) == Kept(7)
    shard = next(saved.glob("rank00002*"))
    content = shard.read_bytes()
    for spoilt, seen in ((content[:-1], "the manifest says"), (content[:-1] + b"x", "SHA-256")):
        shard.write_bytes(spoilt)
        assert seen in read_back(saved).problem
    shard.unlink()
    assert "cannot be read" in read_back(saved).problem


def test_every_operation_on_a_file_can_be_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(files), "open", open)
    for place, name in ((os, "fsync"), (Path, "rename"), (Path, "unlink")):
        monkeypatch.setattr(place, name, getattr(place, name))
    seen, there = [], []

    def within(operation: str, name: str) -> None:
        seen.append((operation, name))
        there.append({each.name: each.stat().st_size for each in tmp_path.iterdir()})

    tap(within)
    files.write(tmp_path, "new.part", [memoryview(b"12345678")], lambda _: "new")
    opened = [operation for operation, name in seen if name == "new.part"]
    assert opened == ["unlink", "write", "fsync", "rename", "unlink", "fsync of the folder"]
    assert set(opened) == set(OPERATIONS)
    assert there == [{}, {"new.part": 4}, {"new.part": 8}, {"new.part": 8}, {"new": 8}, {"new": 8}]
