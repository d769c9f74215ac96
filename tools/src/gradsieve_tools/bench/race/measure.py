"""`gradsieve bench race`: starts an entry's command on every host of a lab and reads what it prints.

It ends an entry when that has reached the target, so that a command need not know of it. A run that has a
log with an end is not run again: a race that was interrupted goes on.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradsieve.errors import GradsieveError
from gradsieve_tools.bench.common.race import Curve
from gradsieve_tools.bench.race import logs
from gradsieve_tools.bench.race.rules import Plan, rate_and_delay
from gradsieve_tools.cli import results
from gradsieve_tools.emulation import Lab

_TICK = 0.2
_SILENCE = 600.0  # seconds without a line after which an entry is taken to hang
_LAST_WORDS = 1500

Advance = Callable[[float, str], None]


def race(
    plan: Plan,
    entries: Mapping[str, Sequence[str]],
    links: Sequence[str],
    seeds: int,
    folder: Path,
    advance: Advance,
) -> None:
    """Race all entries, dense first, and keep a log of each run. Progress is counted in steps."""
    folder.mkdir(parents=True, exist_ok=True)
    for link in links:
        for seed in range(seeds):
            target: float | None = None
            for name, words in entries.items():
                path = logs.path_of(folder, plan.size, link, name, seed)
                log = logs.read(path) if path.exists() else None
                if log is None or log.end == "failed":
                    log = _run(plan, name, words, link, seed, target, path, advance)
                else:
                    advance(plan.most_steps(name), f"{name} was there")
                if name == "dense":
                    if log.end == "failed" or not math.isfinite(log.last):
                        raise GradsieveError(f"dense sets the target and failed: see the end of {path}")
                    target = log.last


def _run(
    plan: Plan,
    name: str,
    words: Sequence[str],
    link: str,
    seed: int,
    target: float | None,
    path: Path,
    advance: Advance,
) -> logs.Log:
    rate, delay = rate_and_delay(link)
    argv = [*words, *plan.told(name, seed)]
    facts = {"entry": name, "size": plan.size, "link": link, "seed": seed, "hosts": plan.hosts}
    facts |= {"steps": plan.steps, "limit": plan.limit, "tokens_sha256": plan.tokens()}
    curve, done, end = Curve("loss"), 0, "steps"
    with path.open("w") as log:
        _write(log, facts | results.origin() | {"command": argv})
        try:
            with tempfile.TemporaryDirectory() as place, Lab(plan.hosts, rate, delay) as lab:
                for line in _evaluations(lab, argv, Path(place)):
                    _write(log, line)
                    curve.add(line["step"], line["seconds"], line["loss"])
                    advance(line["step"] - done, f"{link}, {name}, seed {seed}: loss {line['loss']:.3f}")
                    done = line["step"]
                    if target is not None and curve.crossing(target) is not None:
                        end = "reached"
                        break
                    if name != "dense" and line["seconds"] > plan.limit:
                        end = "seconds"
                        break
        except _FailedError as failure:
            end = "failed"
            _write(log, {"end": end, "words": str(failure)})
        else:
            _write(log, {"end": end})
    advance(max(0, plan.most_steps(name) - done), f"{link}, {name}, seed {seed}: {end}")
    return logs.Log(facts, curve, end)


class _FailedError(Exception):
    """An entry did, which ends no race."""


def _evaluations(lab: Lab, argv: Sequence[str], place: Path) -> Iterator[dict[str, Any]]:
    """The lines of JSON with a step that ranks print, as they come, until all have ended."""
    out, err = place / "out", place / "err"
    with out.open("ab") as stdout, err.open("ab") as stderr:
        processes = lab.spawn(argv, stdout=stdout, stderr=stderr)
    begin = heard = time.monotonic()
    with out.open() as told:
        waiting = ""
        while True:
            codes = [process.poll() for process in processes]
            waiting += told.read()
            *lines, waiting = waiting.split("\n")
            for line in filter(None, map(_evaluation, lines)):
                heard = time.monotonic()
                yield line | {"wall": round(heard - begin, 1)}
            if all(code == 0 for code in codes):
                return
            for rank, code in enumerate(codes):
                if code:
                    raise _FailedError(_words(f"rank {rank} ended with code {code}", err))
            if time.monotonic() - heard > _SILENCE:
                raise _FailedError(_words(f"no rank printed an evaluation for {_SILENCE:g} s", err))
            time.sleep(_TICK)


def _words(what: str, err: Path) -> str:
    return f"{what}: {err.read_text(errors='replace')[-_LAST_WORDS:]}"


def _evaluation(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
        return {"step": int(found["step"]), "seconds": float(found["seconds"]), "loss": float(found["loss"])}
    except (ValueError, KeyError, TypeError):
        return None  # whatever else it says


def _write(log: Any, line: Mapping[str, Any]) -> None:
    log.write(json.dumps(line) + "\n")
    log.flush()
