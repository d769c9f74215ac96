"""The race without its network: entries, what they are told, the table and the picture of its logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradsieve_tools.bench.race import logs


def write(folder: Path, link: str, name: str, seed: int, pace: float, end: str, steps: int = 80) -> None:
    facts = {"entry": name, "size": "1M", "link": link, "seed": seed, "limit": 100.0}
    at = range(20, steps + 1, 20)
    lines = [{"step": step, "seconds": pace * step, "loss": 5 - step / 100} for step in at]
    path = logs.path_of(folder, "1M", link, name, seed)
    path.write_text("\n".join(map(json.dumps, [facts, *lines, {"end": end}])))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed in (0, 1):
        write(tmp_path, "100mbit", "dense", seed, 1.0 + seed, "steps")
        write(tmp_path, "100mbit", "auto", seed, 0.25, "reached")
        write(tmp_path, "100mbit", "late", seed, 2.0, "seconds", steps=60 if seed else 80)
        write(tmp_path, "100mbit", "lame", seed, 0.5, "steps", steps=60)
        write(tmp_path, "100mbit", "dead", seed, 0.5, "failed")
    write(tmp_path, "1gbit", "dense", 0, 1.0, "steps")
    return tmp_path


def test_the_table_says_who_was_faster_and_who_did_not_arrive(folder: Path) -> None:
    rows = logs.table(logs.read_all(folder))
    assert [(row["link"], row["entry"]) for row in rows[:3]] == [
        ("1gbit", "dense"),
        ("100mbit", "dense"),
        ("100mbit", "auto"),
    ]
    found = {row["entry"]: row for row in rows[1:]}
    assert (found["dense"]["seconds"], found["dense"]["times_dense"]) == ("120.0", 1.0)
    assert found["dense"]["spread"] == pytest.approx(56.57, abs=0.01)
    assert (found["auto"]["seconds"], found["auto"]["steps"], found["auto"]["step_ms"]) == ("20.0", 80, 250)
    assert found["auto"]["times_dense"] == pytest.approx((80 / 20 + 160 / 20) / 2)
    assert (found["late"]["seconds"], found["late"]["reached"]) == ("not within 100 s", "1 of 2")
    assert found["late"]["times_dense"] is None, "a mean over those that got there would flatter"
    assert found["lame"]["seconds"] == "not within 60 steps"
    assert (found["dead"]["seconds"], found["dead"]["reached"]) == ("failed", "0 of 2")
