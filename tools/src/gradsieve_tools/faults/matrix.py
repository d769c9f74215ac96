"""The kill matrix: each op of a scheme's step x what can happen x each of three ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from gradsieve.errors import GradsieveError
from gradsieve_tools.emulation.stores import store_at
from gradsieve_tools.faults.fleet import Ending, Fleet
from gradsieve_tools.faults.kinds import KINDS, STOP, Fault
from gradsieve_tools.faults.trained import DONE, Task, be_rank
from gradsieve_tools.faults.verdicts import Line, verdict_of

WORLD = 3
STEPS = 6
DEADLINE_OF_DEATHS = 60.0
"""Long: a death has to be noticed without it."""
DEADLINE_OF_STALLS = 2.0
_LIMIT = 20.0


@dataclass(frozen=True, slots=True)
class Clean:
    """An undisturbed run, for comparison."""

    scheme: str
    ops: dict[int, list[str]]
    """By step."""
    digests: list[int]

    def points(self) -> list[tuple[int, int]]:
        """Step and op of every fault: the first step of each sequence of ops, but for the very first, before
        which there is nothing to lose."""
        sequences: dict[tuple[str, ...], int] = {}
        for step, ops in self.ops.items():
            if step > 0:
                sequences.setdefault(tuple(ops), step)
        return [(step, op) for ops, step in sequences.items() for op in range(len(ops))]


class Matrix:
    """Runs cases, one at a time. The store is in this process, as torchrun's is in its agent."""

    def __init__(self, seed: int = 1) -> None:
        self.fleet = Fleet(be_rank.__module__)
        self._store = store_at("127.0.0.1")
        self._seed = seed
        self._cases = 0

    def clean(self, scheme: str) -> Clean:
        endings = self.endings(scheme, DEADLINE_OF_DEATHS, None)
        ended = [ending.message("ended") for ending in endings]
        if any(ending.exit_code != DONE for ending in endings):
            raise GradsieveError(
                f"{scheme}, undisturbed: {[(e.exit_code, e.messages, e.stacks) for e in endings]}"
            )
        if any(each["digests"] != ended[0]["digests"] for each in ended):
            raise GradsieveError(f"{scheme}, undisturbed: ranks do not share one model")
        ops = {int(step): ops for step, ops in ended[0]["ops"].items() if int(step) < STEPS}
        return Clean(scheme, ops, ended[0]["digests"])

    def cases(self, clean: Clean, kinds: Sequence[str] = tuple(KINDS)) -> list[Fault]:
        return [
            Fault(kind, rank, step, op)
            for (step, op), kind, rank in product(clean.points(), kinds, range(WORLD))
        ]

    def run(self, clean: Clean, faults: Sequence[Fault]) -> Iterator[Line]:
        for fault in faults:
            deadline = DEADLINE_OF_DEATHS if fault.is_death else DEADLINE_OF_STALLS
            endings = self.endings(clean.scheme, deadline, fault)
            task = self._task(clean.scheme, deadline, STEPS)
            yield verdict_of(fault, task, endings, clean.digests, clean.ops[fault.step][fault.op])

    def endings(
        self,
        scheme: str,
        deadline: float,
        fault: Fault | None,
        stop_seconds: float | None = None,
        steps: Sequence[int] = (STEPS,) * WORLD,
    ) -> list[Ending]:
        """One case. A stop lasts so long, or until all others have ended; every rank has its own number of
        batches."""
        self._cases += 1
        arguments = [(rank, WORLD, self._task(scheme, deadline, steps[rank]), fault) for rank in range(WORLD)]
        stopped = fault.rank if fault is not None and fault.kind == STOP else None
        return self.fleet.run(be_rank, arguments, _LIMIT, stopped, stop_seconds)

    def _task(self, scheme: str, deadline: float, steps: int) -> Task:
        return Task(scheme, steps, deadline, self._seed, self._store.port, f"case{self._cases}")
