"""Carries programs over a network that SimGrid simulates: virtual ranks, real schedules, simulated seconds.

P programs advance together, as in `lockstep`, which also forms the replies. Every op is cut into rounds of
messages (`messages.py`), and SimGrid says how long a round takes on the network (`simgrid_process.py`).

A round that is repeated is simulated once. It takes as long each time: the same messages start at the same
time on an idle network. Nor would ranks that wait only for their own messages be faster around a ring: what
a rank needs for its next round comes, in the end, by way of the slowest hop, as often as there are rounds.

An all-to-all has P - 1 different rounds. Beyond `FEW_ROUNDS` some of them, evenly spread, stand for all.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gradsieve.schemes import Op, Program, Result
from gradsieve.testing import lockstep
from gradsieve_tools.errors import SimulationError
from gradsieve_tools.simulate.messages import Call, Collectives, Price, Round, call_of, rounds_of

FEW_ROUNDS = 8  # rounds of one op that are all simulated
_SCRIPT = Path(__file__).with_name("simgrid_process.py")
_PYTHONS = (sys.executable, "/usr/bin/python3")


@dataclass(frozen=True, slots=True)
class Platform:
    """A network, as SimGrid reads it."""

    xml: str
    hosts: tuple[str, ...]  # of the ranks, in order
    price: Price  # a message between two hosts, nothing else on the way
    message_seconds: float  # seconds that a rank is busy with a message before the network has it
    slow: dict[str, float]  # times slower, by host


@dataclass(slots=True)
class Carried:
    seconds: float = 0.0
    rounds: int = 0
    sent: float = 0.0  # bytes of the busiest rank of each round
    simulated: int = 0  # rounds that SimGrid ran; others repeat one or are as long as their neighbours

    def add(self, other: Carried) -> None:
        self.seconds += other.seconds
        self.rounds += other.rounds
        self.sent += other.sent
        self.simulated += other.simulated


class Network:
    """A SimGrid process with a platform in it."""

    def __init__(self, platform: Platform, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self.platform, self._process, self._errors = platform, process, errors
        self.links: list[str] = []
        self.rates: NDArray[np.float64] = np.zeros(0)

    def greet(self, file: Path) -> None:
        first = {"platform": str(file), "hosts": self.platform.hosts, "slow": self.platform.slow}
        answer = self._ask(first)
        self.links, self.rates = answer["links"], np.array(answer["rates"])

    def carry(
        self,
        call: Call,
        collectives: Collectives = "ring",
        every: bool = False,
        heard: Callable[[int], None] = lambda rounds: None,
    ) -> Carried:
        """Simulate one op of all ranks. `every`: each round, also those alike. `heard` is called with rounds
        done."""
        carried = Carried()
        for one in _sampled(rounds_of(call, collectives, self.platform.price), every):
            repeats = one.times if every else 1
            for _ in range(repeats if one.sources.size else 0):
                seconds = self._seconds(replace(one, times=one.times // repeats))
                busy = self.platform.message_seconds * one.most_messages
                carried.seconds += (seconds + busy) * (one.times // repeats)
                carried.simulated += 1
            carried.rounds += one.times
            carried.sent += one.most_bytes * one.times
            heard(one.times)
        return carried

    def loads(self) -> NDArray[np.float64]:
        """Bytes over each link since this was last asked."""
        return np.array(self._ask({"loads": True})["loads"])

    def _seconds(self, one: Round) -> float:
        sizes = np.maximum(1, np.round(one.sizes)).astype(np.int64)
        answer = self._ask(
            {
                "sources": one.sources.tolist(),
                "targets": one.targets.tolist(),
                "sizes": sizes.tolist(),
                "times": one.times,
            }
        )
        return float(answer["seconds"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        ask, hear = self._process.stdin, self._process.stdout
        assert ask is not None
        assert hear is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=ask, flush=True)
        line = hear.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if "/INFO]" not in line]
        said = next(filter(None, lines), "nothing")[:300]
        raise SimulationError(f"SimGrid ended with code {code} before it had answered; it said: {said}")


@contextlib.contextmanager
def network(platform: Platform) -> Iterator[Network]:
    """The platform, ready to carry; its process ends with the block."""
    python = require()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        file = Path(folder, "platform.xml")
        file.write_text(platform.xml)
        process = subprocess.Popen(
            [python, "-I", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            made = Network(platform, process, errors)
            made.greet(file)
            yield made
        finally:
            process.kill()  # it has nothing to save
            process.communicate()


@functools.cache
def python_with_simgrid() -> str | None:
    """The first interpreter that has SimGrid: this one, or the system's, for which Debian builds it."""
    for python in _PYTHONS:
        with contextlib.suppress(OSError):
            asked = subprocess.run([python, "-I", "-c", "import simgrid"], capture_output=True, check=False)
            if asked.returncode == 0:
                return python
    return None


def require() -> str:
    python = python_with_simgrid()
    if python is not None:
        return python
    raise SimulationError(
        f"neither {' nor '.join(_PYTHONS)} can import simgrid: on Debian or Ubuntu "
        "`apt install python3-simgrid`; elsewhere build SimGrid 3.32 or later with its Python bindings"
    )


def run(
    programs: Sequence[Program[Result]], over: Network, collectives: Collectives = "ring"
) -> tuple[list[Result], Carried]:
    """Drive one program a rank to its end; the results in rank order, and what it took."""
    total = Carried()

    def carry(ops: Sequence[Op]) -> None:
        total.add(over.carry(call_of(ops), collectives))

    return lockstep.run(programs, observe=carry), total


def _sampled(rounds: list[Round], every: bool) -> list[Round]:
    """Keep at most `FEW_ROUNDS` of rounds that are alike, each standing for its neighbours."""
    if every or len(rounds) <= FEW_ROUNDS or not all(one.alike for one in rounds):
        return rounds
    edges = np.linspace(0, len(rounds), FEW_ROUNDS + 1).round().astype(int)
    return [replace(rounds[(first + last) // 2], times=int(last - first)) for first, last in pairwise(edges)]
