"""kill -9 before each system call of a save: afterwards a whole checkpoint loads, the new one where it was
acknowledged.

    python scripts/kill_saves.py --json benchmarks/results/kill-saves-2026-11-17.json

Real ranks train, save, go on and save again (`saving_ranks.py`). In the second save strace kills rank 0
before one of its main thread's system calls, each of them in turn; then rank 1. It counts calls by name: the
first openat, the second, until the save returns, then the next name. The others have to end by themselves,
with an error or with the save done. New ranks load what is there: each has to hold what it had
before the first or the second save, all of them the same one, and the second one if the save returned
anywhere. They go on from it to the next kill. Needs strace, and root or the right to trace.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from saving_ranks import BEGIN, END, KINDS, WORLDS, Case, be_rank

from gradsieve_tools.chaos.fleet import Ending, Fleet
from gradsieve_tools.emulation.stores import store_at

Call = tuple[str, int]
_LIMIT = 45.0
"""Seconds for a life, on a machine that is busy with other work; the process groups have longer time-outs."""


@dataclass(frozen=True, slots=True)
class Line:
    """One kill."""

    name: str
    """Of the system call."""
    number: int
    returned: bool
    """On some rank."""
    found: str
    """`first`, `second`, or what is wrong."""
    survivors: tuple[str, ...]
    """What their saves ended with."""

    @property
    def is_good(self) -> bool:
        ended = "hung" not in self.survivors
        return ended and (self.found == "second" or (self.found == "first" and not self.returned))


@dataclass(frozen=True, slots=True)
class Life:
    """What the ranks reported, and the victim's system calls since the save began."""

    call: Call | None
    endings: list[Ending]
    calls: list[str]

    @property
    def is_killed_in_save(self) -> bool:
        return bool(self.calls) and END not in self.calls


class Chain:
    """Lives of one kind of training, each going on from what the one before has left."""

    def __init__(
        self, kind: str, folder: Path, life: Callable[..., None] = be_rank, preload: str = be_rank.__module__
    ) -> None:
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the fork server finds what we find
        self._kind, self._folder, self._life = kind, folder, life
        self._fleet = Fleet(preload)
        self._store = store_at("127.0.0.1")
        self._lives = self._places = 0
        self._begin_anew()

    def calls(self, victim: int) -> list[str]:
        """Of an undisturbed save."""
        life = self._live(victim, None)
        if any(not ending.message("saved") for ending in life.endings):
            raise SystemExit(f"{self._kind}, undisturbed: {life.endings}")
        return life.calls[: life.calls.index(END)]

    def every_kill(self, victim: int) -> Iterator[Line]:
        """Of each name as many as there are, this time: waits are not always as many."""
        for name in dict.fromkeys(self.calls(victim)):
            yield from self.kills(victim, ((name, number) for number in count(1)))

    def kills(self, victim: int, calls: Iterable[Call]) -> Iterator[Line]:
        """Before each of these calls, until a save returns."""
        before: Life | None = None
        for call in chain(calls, (None,)):  # the last life only loads
            life = self._live(victim, call)
            if before is not None:
                line = evaluated(before, life, victim)
                yield line
                if line.found not in ("first", "second"):
                    self._begin_anew()
                    life = self._live(victim, call)
            if END in life.calls:
                return
            if life.endings[victim].exit_code != -signal.SIGKILL:
                raise SystemExit(f"{self._kind}, before {call}: {life.endings}")
            before = life if life.is_killed_in_save else None

    def _live(self, victim: int, call: Call | None) -> Life:
        self._lives += 1
        world = WORLDS[self._kind]
        case = Case(self._kind, world, self._store.port, f"life{self._lives}", str(self._place), victim, call)
        case.log.unlink(missing_ok=True)
        endings = self._fleet.run(self._life, [(rank, case) for rank in range(world)], _LIMIT)
        log = case.log.read_text() if case.log.exists() else ""
        names = re.findall(r"^(\w+)\(", log.rpartition(f"{BEGIN}(")[2], re.MULTILINE)
        return Life(call, endings, names)

    def _begin_anew(self) -> None:
        """What could not be loaded stays for who wants to look at it."""
        self._places += 1
        self._place = self._folder / f"{self._kind}-{self._places}"
        self._place.mkdir()


def evaluated(before: Life, after: Life, victim: int) -> Line:
    """By what the life after has loaded."""
    loaded = [ending.message("loaded").get("digest") for ending in after.endings]
    found = "; ".join(f"rank {rank}: {_end_of(each)}" for rank, each in enumerate(after.endings))
    for which in ("second", "first"):
        if None not in loaded and loaded == [each.message(which).get("digest") for each in before.endings]:
            found = which
    others = [_end_of(each) for rank, each in enumerate(before.endings) if rank != victim]
    assert before.call is not None
    return Line(*before.call, "saved" in others, found, tuple(others))


def _end_of(ending: Ending) -> str:
    if ending.exit_code is None:
        return "hung"
    if ending.message("saved"):
        return "saved"
    raised = ending.message("raised")
    return f"{raised['error']}: {raised['said']}" if raised else f"exit code {ending.exit_code}"


def summary(kind: str, victim: int, lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "training": kind,
        "world": WORLDS[kind],
        "killed rank": victim,
        "kills": len(lines),
        "good": sum(line.is_good for line in lines),
        "the first checkpoint loads": sum(line.found == "first" for line in lines),
        "the second checkpoint loads": sum(line.found == "second" for line in lines),
        "the second save returned on another rank": sum(line.returned for line in lines),
        "killed before": dict(Counter(line.name for line in lines).most_common()),
        "survivors": dict(Counter(each.partition(":")[0] for line in lines for each in line.survivors)),
        "bad": [asdict(line) for line in lines if not line.is_good],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 before each system call of a save")
    parser.add_argument("--training", choices=KINDS, nargs="+", default=[*KINDS])
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    about = {
        "command": f"python scripts/kill_saves.py {' '.join(sys.argv[1:])}",
        "torch": torch.__version__,
        "lightning": version("lightning"),
    }
    results = []
    with tempfile.TemporaryDirectory(prefix="gradsieve-kills-") as folder:
        for kind in arguments.training:
            lives = Chain(kind, Path(folder), preload="saving_lightning")  # one fork server for all
            for victim in (0, 1):
                lines = []
                for line in lives.every_kill(victim):
                    lines.append(line)
                    verdict = "good" if line.is_good else "BAD"
                    print(kind, f"rank {victim}", line.name, line.number, line.found, verdict, flush=True)
                results.append(summary(kind, victim, lines))
                print(json.dumps(results[-1], indent=1), flush=True)
                if arguments.json:  # each time: it takes long, and what was found is not lost with the rest
                    arguments.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    return int(any(each["bad"] for each in results))


if __name__ == "__main__":
    sys.exit(main())
