"""Fault after fault on one training a scheme, each from the checkpoint that the last one left."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradsieve.errors import GradsieveError
from gradsieve.integrations.folder import read_manifest
from gradsieve.lab import tools
from gradsieve.lab.chaos import ground as grounds
from gradsieve.lab.chaos.ground import Ground
from gradsieve.lab.chaos.judge import NAMED, Clean, Line, is_resumed, judge, noted
from gradsieve.lab.chaos.kinds import KINDS, Needs
from gradsieve.lab.chaos.rank import Episode, be_rank
from gradsieve.lab.chaos.schedule import DEADLINE_OF_DEATHS, STEPS, WORLD, Chance
from gradsieve.lab.faults.fleet import FOLDER, Ending, Fleet
from gradsieve.lab.faults.kinds import STOP
from gradsieve.lab.faults.trained import DONE, Task

_LIMIT = 25.0
_CLEAN_LIMIT = 300.0


def missing() -> dict[str, str]:
    """Kinds that cannot be done here, and what they need."""
    is_root = os.geteuid() == 0
    there = {
        Needs.NOTHING: True,
        Needs.LINKS: tools.available() is None,
        Needs.DISK: is_root,
        Needs.PROCESSOR: grounds.has_cpu_quota(),
    }
    return {name: kind.needs.value for name, kind in KINDS.items() if not there[kind.needs]}


class Campaign:
    """One at a time in a process. As a block: what it makes is gone afterwards."""

    def __init__(self, seed: int, chances: Sequence[Chance], life: Callable[..., None] = be_rank) -> None:
        """`life` is what a rank's process runs."""
        self.seed, self.chances, self._life = seed, chances, life
        self.recovered: Counter[str] = Counter()
        """By kind: faults that ended the ranks, and all were back with what an undisturbed run has."""
        self._fleet = Fleet(be_rank.__module__)
        self._stack = ExitStack()
        self._clean: dict[str, Clean] = {}
        self._pending: dict[str, list[str]] = {}
        self._cases = 0

    def __enter__(self) -> Campaign:
        with ExitStack() as stack:
            self._root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradsieve-chaos-")))
            needs = {KINDS[chance.kind].needs for chance in self.chances}
            lab: AbstractContextManager[Ground | None] = (
                grounds.hosts(WORLD) if Needs.LINKS in needs else nullcontext()
            )
            self._hosts = stack.enter_context(lab)
            self._loopback = Ground()
            for scheme in sorted({chance.scheme for chance in self.chances}):
                self._folder(scheme).mkdir()
                if Needs.DISK in needs:
                    stack.enter_context(grounds.small_disk(self._folder(scheme)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def remains(self) -> list[str]:
        """What is still there and should not be, once the block has ended."""
        own = f"gs{os.getpid()}-"
        spaces = Path("/var/run/netns")
        names = (
            [each.name for each in spaces.iterdir() if each.name.startswith(own)] if spaces.exists() else []
        )
        mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if str(self._root) in line]
        groups = [str(each) for each in Path("/sys/fs/cgroup/cpu").glob(f"{self._root.name}-*")]
        folders = [str(each) for each in self._root.parent.glob(f"{FOLDER}{os.getpid()}-*")]
        folders += [str(self._root)] if self._root.exists() else []
        return [
            *names,
            *mounts,
            *groups,
            *folders,
            *(f"rank of process {pid}" for pid in self._fleet.ranks()),
        ]

    def run(self) -> Iterator[Line]:
        counts = Counter(chance.scheme for chance in self.chances)
        for scheme, count in counts.items():
            self._begin(scheme, STEPS * (count + 1))
        for chance in self.chances:
            yield self._fault(chance)
        for scheme in counts:
            self._finish(scheme)

    # -- a training -------------------------------------------------------------------------------------

    def _begin(self, scheme: str, steps: int) -> None:
        """The undisturbed run, and the checkpoint of step 0."""
        endings = self._episode(scheme, None, steps=steps, fresh=True, saves=False, limit=_CLEAN_LIMIT)
        self._must_be_done(scheme, endings)
        told = [noted(ending) for ending in endings]
        self._clean[scheme] = {step: [each[step] for each in told] for step in told[0]}
        if any(each[0] != ranks[0][0] for ranks in self._clean[scheme].values() for each in ranks):
            raise GradsieveError(f"{scheme}, undisturbed: ranks do not share one model")
        self._must_be_done(scheme, self._episode(scheme, None, steps=0, fresh=True))

    def _fault(self, chance: Chance) -> Line:
        scheme, before = chance.scheme, self._at(chance.scheme)
        files = {each: each.read_bytes() for each in self._folder(scheme).iterdir()}
        endings = self._episode(scheme, chance)
        self._resumed(scheme, endings, before)
        line = judge(chance, self.seed, endings, self._clean[scheme], before, self._at(scheme))
        if line.outcome == NAMED:
            self._pending.setdefault(scheme, []).append(line.kind)
        if extra := self._too_much(scheme):
            line = replace(line, outcome=f"left {extra} in the checkpoint's folder")
        if pids := self._fleet.ranks():
            line = replace(line, outcome=f"left processes {pids}")
        if not line.is_good:  # one that spoilt the training is not to spoil the verdicts on others
            for each in self._folder(scheme).iterdir():
                each.unlink()
            for path, content in files.items():
                path.write_bytes(content)
        return line

    def _finish(self, scheme: str) -> None:
        """Undisturbed, from what all faults left."""
        before = self._at(scheme)
        endings = self._episode(scheme, None)
        self._must_be_done(scheme, endings)
        self._resumed(scheme, endings, before)
        if not is_resumed(endings, self._clean[scheme], self._at(scheme)):
            raise GradsieveError(f"{scheme}: the training ended with another model than an undisturbed one")

    def _resumed(self, scheme: str, endings: Sequence[Ending], at: int) -> None:
        if is_resumed(endings, self._clean[scheme], at):
            self.recovered.update(self._pending.pop(scheme, []))

    def _at(self, scheme: str) -> int:
        return read_manifest(self._folder(scheme)).step

    def _too_much(self, scheme: str) -> list[str]:
        """What a rank that died while it wrote leaves is removed by the next save; more than that is not."""
        names = sorted(each.name for each in self._folder(scheme).iterdir())
        return names if len(names) > 2 * WORLD + 2 else []

    def _folder(self, scheme: str) -> Path:
        return self._root / scheme

    def _must_be_done(self, scheme: str, endings: Sequence[Ending]) -> None:
        if any(ending.exit_code != DONE for ending in endings):
            each = [(ending.exit_code, ending.told("ended").get("said"), ending.stacks) for ending in endings]
            raise GradsieveError(f"{scheme}, undisturbed: {each}")

    def _episode(
        self, scheme: str, chance: Chance | None, *, steps: int = STEPS, limit: float = _LIMIT, **how: Any
    ) -> list[Ending]:
        needs_links = chance is not None and KINDS[chance.kind].needs is Needs.LINKS
        ground = self._hosts if needs_links and self._hosts is not None else self._loopback
        deadline = DEADLINE_OF_DEATHS if chance is None else chance.deadline
        self._cases += 1
        case = f"case{self._cases}"
        task = Task(scheme, steps, deadline, self.seed, ground.store.port, case, ground.host)
        namespaces = tuple(ground.namespace(rank) for rank in range(WORLD))
        folder = self._folder(scheme)
        episode = Episode(task, str(folder), WORLD, ground.interface, namespaces, chance, **how)
        is_stop = chance is not None and chance.kind in (STOP, "short SIGSTOP")
        try:
            return self._fleet.run(
                self._life,
                [(rank, episode) for rank in range(WORLD)],
                limit,
                chance.rank if chance is not None and is_stop else None,
                deadline / 2 if chance is not None and chance.kind == "short SIGSTOP" else None,
            )
        finally:
            if needs_links:
                ground.mend()
            grounds.give_back(folder)
