"""What `speeds=` of ExDyna and DEFT saves where one of four hosts computes at half the speed of the others.

    python benchmarks/speeds.py --params 12e6 --json FILE

Virtual ranks in one process. Processor time of a rank's own program is measured, exchanges left out, and that
of the slow rank counts twice: no host was slow. A step waits for the longest.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from gradsieve.testing import lockstep
from gradsieve.types import Ctx, Program
from gradsieve_tools.bench.common.machine import one_thread
from gradsieve_tools.bench.traffic import Case, Fleet, layers
from gradsieve_tools.cli import results

WORLD, SLOW, TIMES = 4, 0, 2.0
SPEEDS = (1.0, TIMES, TIMES, TIMES)
WARM_UP = 10


def timed(program: Program[Any], spent: list[float], rank: int) -> Program[Any]:
    """The same program; seconds of it are added up."""
    reply: Any = None
    while True:
        start = time.thread_time()
        try:
            op = program.send(reply)
        except StopIteration as end:
            return end.value
        finally:
            spent[rank] += time.thread_time() - start
        reply = yield op


class Timed(Fleet):
    def step_seconds(self) -> list[float]:
        """Of every rank, in one step."""
        spent = [0.0] * WORLD
        for rank in range(WORLD):
            self.gradients.add_to(self.residuals[rank])
        contexts = [Ctx(rank, WORLD, self.taken) for rank in range(WORLD)]
        programs = [
            timed(self.scheme.exchange(self.residuals[rank], self.states[rank], contexts[rank]), spent, rank)
            for rank in range(WORLD)
        ]
        for rank, outcome in enumerate(lockstep.run(programs)):
            outcome.spent.subtract_from(self.residuals[rank])
            self.states[rank] = self.scheme.next_states([outcome.state])[0]
        self.taken += 1
        return spent


def row(name: str, given: tuple[float, ...] | None, sizes: tuple[int, ...], steps: int) -> dict[str, Any]:
    fleet = Timed(Case(name, WORLD, sum(sizes), 0.001, sizes))
    if given is not None:
        object.__setattr__(fleet.scheme, "speeds", given)
        fleet.states = [fleet.scheme.init_state(sizes, WORLD) for _ in range(WORLD)]
    seconds = [fleet.step_seconds() for _ in range(WARM_UP + steps)][WARM_UP:]
    slow = [each[SLOW] * TIMES for each in seconds]
    others = [max(each[rank] for rank in range(WORLD) if rank != SLOW) for each in seconds]
    longest = [max(pair) for pair in zip(slow, others, strict=True)]
    found = {"slow_ms": slow, "others_ms": others, "longest_ms": longest}
    said = {what: round(1e3 * fmean(times), 3) for what, times in found.items()}
    return {"scheme": name, "speeds": None if given is None else list(given), "steps": steps, **said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=float, default=12e6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    sizes = layers("transformer", int(args.params))
    with one_thread():
        rows = [
            row(name, given, sizes, args.steps) for name in ("exdyna", "deft") for given in (None, SPEEDS)
        ]
    print(results.table(rows, list(rows[0])))
    results.write(args.json, {"world": WORLD, "slow": SLOW, "times": TIMES, "params": sum(sizes)}, rows)


if __name__ == "__main__":
    main()
