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

from gradsieve.checkpoint import files as checkpoints
from gradsieve.errors import GradsieveError
from gradsieve_tools.chaos import ground as grounds
from gradsieve_tools.chaos.fleet import DONE, FOLDER, Ending, Fleet
from gradsieve_tools.chaos.ground import Ground
from gradsieve_tools.chaos.kinds import KINDS, SHORT_STOP, STOP, ZOMBIE, Needs
from gradsieve_tools.chaos.rank import Episode, be_rank
from gradsieve_tools.chaos.schedule import DEADLINE_OF_DEATHS, STEPS, WORLD, Chance
from gradsieve_tools.chaos.verdicts import (
    NAMED,
    Clean,
    Line,
    acknowledged,
    digests_of,
    is_resumed,
    read_back,
    verdict_of,
)
from gradsieve_tools.emulation import tools

_LIMIT = 25.0
_CLEAN_LIMIT = 300.0


def missing() -> dict[str, str]:
    """Kinds that cannot be done here, and what they need."""
    is_root = os.geteuid() == 0
    there = {
        Needs.NOTHING: True,
        Needs.STORE: True,
        Needs.LINKS: tools.available() is None,
        Needs.DISK: is_root,
        Needs.PROCESSOR: grounds.has_cpu_quota(),
    }
    return {name: kind.needs.value for name, kind in KINDS.items() if not there[kind.needs]}


class Campaign:
    def __init__(self, seed: int, chances: Sequence[Chance], life: Callable[..., None] = be_rank) -> None:
        """`life` is what a rank's process runs."""
        self.seed, self.chances, self._life = seed, chances, life
        # by kind: faults after which all ranks resumed with the undisturbed bits
        self.recovered: Counter[str] = Counter()
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # c10d's stacks, pages for a store that is gone
        self._fleet = Fleet(be_rank.__module__)
        self._stack = ExitStack()
        self._clean: dict[str, Clean] = {}
        self._pending: dict[str, list[str]] = {}
        self._cases = 0
        self._unsaved: Counter[str] = Counter()  # episodes of a scheme since a save last returned

    def __enter__(self) -> Campaign:
        with ExitStack() as stack:
            self._root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradsieve-chaos-")))
            needs = {KINDS[chance.kind].needs for chance in self.chances}
            lab: AbstractContextManager[Ground | None] = (
                grounds.hosts(WORLD) if Needs.LINKS in needs else nullcontext()
            )
            mortal: AbstractContextManager[Ground | None] = (
                grounds.mortal() if Needs.STORE in needs else nullcontext()
            )
            self._grounds = {
                Needs.LINKS: stack.enter_context(lab),
                Needs.STORE: stack.enter_context(mortal),
            }
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
        """Return what is still there and should not be, once the block has ended."""
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
            *(f"process {pid}" for pid in self._fleet.ranks()),
        ]

    def ops_of_a_step(self, scheme: str) -> int:
        """Return the most ops of a step after the first, without a fault."""
        endings = self._episode(scheme, None, steps=6, fresh=True, saves=False)
        self._must_be_done(scheme, endings)
        ops: dict[str, int] = endings[0].message("ended")["ops"]
        return max(count for step, count in ops.items() if int(step) > 0)

    def run(self) -> Iterator[Line]:
        counts = Counter(chance.scheme for chance in self.chances)
        counts.update(chance.scheme for chance in self.chances if chance.kind == ZOMBIE)  # and successors
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
        ranks = [digests_of(ending) for ending in endings]
        self._clean[scheme] = {step: [each[step] for each in ranks] for step in ranks[0]}
        if any(each[0] != ranks[0][0] for ranks in self._clean[scheme].values() for each in ranks):
            raise GradsieveError(f"{scheme}, undisturbed: ranks do not share one model")
        self._must_be_done(scheme, self._episode(scheme, None, steps=0, fresh=True))

    def _fault(self, chance: Chance) -> Line:
        scheme, before = chance.scheme, self._at(chance.scheme)
        files = {each: each.read_bytes() for each in self._folder(scheme).iterdir()}
        successors: list[Ending] = []
        endings = self._episode(
            scheme, chance, meanwhile=lambda: successors.extend(self._episode(scheme, None))
        )
        self._resumed(scheme, endings, before)
        kept = read_back(self._folder(scheme))
        line = verdict_of(chance, self.seed, endings, self._clean[scheme], before, kept, successors)
        if line.outcome == NAMED:
            self._pending.setdefault(scheme, []).append(line.kind)
        if extra := self._too_much(scheme, has_saved=acknowledged(endings, before) > before):
            line = replace(line, outcome=f"left {extra} in the checkpoint's folder")
        if pids := self._processes():
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
        return checkpoints.read_manifest(self._folder(scheme)).step

    def _too_much(self, scheme: str, has_saved: bool) -> list[str]:
        """Return files beyond those of a checkpoint and of the saves that faults broke off since."""
        self._unsaved[scheme] = 1 if has_saved else 1 + self._unsaved[scheme]
        names = sorted(each.name for each in self._folder(scheme).iterdir())
        return names if len(names) > (WORLD + 3) * (1 + self._unsaved[scheme]) else []

    def _processes(self) -> list[int]:
        """Left by ranks."""
        store = self._grounds[Needs.STORE]
        return [pid for pid in self._fleet.ranks() if store is None or pid != store.store_pid]

    def _folder(self, scheme: str) -> Path:
        return self._root / scheme

    def _must_be_done(self, scheme: str, endings: Sequence[Ending]) -> None:
        if any(ending.exit_code != DONE for ending in endings):
            each = [
                (ending.exit_code, ending.message("ended").get("said"), ending.stacks) for ending in endings
            ]
            raise GradsieveError(f"{scheme}, undisturbed: {each}")

    def _episode(
        self,
        scheme: str,
        chance: Chance | None,
        *,
        steps: int = STEPS,
        limit: float = _LIMIT,
        meanwhile: Callable[[], None] | None = None,
        **how: Any,
    ) -> list[Ending]:
        """`meanwhile`: before a rank that was stopped in its save is continued."""
        ground = (None if chance is None else self._grounds.get(KINDS[chance.kind].needs)) or self._loopback
        deadline = DEADLINE_OF_DEATHS if chance is None else chance.deadline
        self._cases += 1
        folder = self._folder(scheme)
        episode = Episode(
            *(scheme, steps, deadline, self.seed, (ground.host, ground.store_port), f"case{self._cases}"),
            *(str(folder), ground.interface, tuple(ground.namespace(rank) for rank in range(WORLD)), chance),
            store_pid=ground.store_pid,
            **how,
        )
        kind = "" if chance is None else chance.kind
        try:
            return self._fleet.run(
                self._life,
                [(rank, episode) for rank in range(WORLD)],
                limit,
                chance.rank if chance is not None and kind in (STOP, SHORT_STOP, ZOMBIE) else None,
                deadline / 2 if kind == SHORT_STOP else None,
                meanwhile if kind == ZOMBIE else None,
            )
        finally:
            ground.fix()
            grounds.give_back(folder)
