"""The race starts commands on the hosts of a lab, ends them by its rules, and keeps logs."""

import json
import sys
from pathlib import Path

import pytest

from gradsieve_tools.bench.race import logs, measure
from gradsieve_tools.bench.race.rules import Plan

pytestmark = pytest.mark.lab

ENTRY = """
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--learns", type=float, default=1.0)
parser.add_argument("--pace", type=float, default=0.1)
parser.add_argument("--dies-at", type=int)
parser.add_argument("--steps", type=int)
parser.add_argument("--evaluate-every", type=int)
args, _ = parser.parse_known_args()
for step in range(args.evaluate_every, args.steps + 1, args.evaluate_every):
    if os.environ["RANK"] == "0":
        print("something else", flush=True)
        loss = 5.0 - args.learns * step / 100
        print(json.dumps({"step": step, "seconds": args.pace * step, "loss": loss}), flush=True)
    if args.dies_at == step:
        sys.exit(f"it was step {step}")
time.sleep(60 if args.learns > 1 else 0)  # who is ended need not end
"""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "entry.py").write_text(ENTRY)
    (tmp_path / "text.json").write_text(json.dumps({"tokens_sha256": "ab"}))
    return Plan(tmp_path, "tiny", hosts=2, steps=80, limit=12.0)


def raced(plan: Plan, **entries: str) -> dict[str, logs.Log]:
    words = {
        name: [sys.executable, str(plan.text / "entry.py"), *text.split()] for name, text in entries.items()
    }
    measure.race(plan, words, ["1gbit"], 1, plan.text / "logs", lambda *_: None)
    return {log.name: log for log in logs.read_all(plan.text / "logs")}


def test_an_entry_ends_where_the_rules_say(plan: Plan) -> None:
    others = {"quick": "--learns 2", "slow": "--pace 0.3", "flat": "--learns 0", "dead": "--dies-at 40"}
    found = raced(plan, dense="", **others)
    ends = {name: (log.end, log.curve.steps[-1]) for name, log in found.items()}
    assert ends == {
        "dense": ("steps", 80),
        "quick": ("reached", 60),  # a mean of 4.6, 4.2, 3.8; that of dense is 4.4 at its end
        "slow": ("seconds", 60),
        "flat": ("seconds", 140),
        "dead": ("failed", 40),
    }
    assert found["dense"].facts["command"][-2:] == ["--evaluate-every", "20"]
    words = (plan.text / "logs" / "tiny-1gbit-dead-0.jsonl").read_text().splitlines()[-1]
    assert "rank 0 ended with code 1: it was step 40" in json.loads(words)["words"]
