"""One training on two spot nodes: what happens to them by a seeded schedule, and whether a bit was lost.

disturbed   workers and nodes are killed, or given notice; nodes that go are replaced
stopped     all nodes are given notice, and save together
ended       a few more steps from that checkpoint, and the digest of the model
checked     the same steps undisturbed; every checkpoint was read back when it appeared
"""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradsieve.checkpoint import files
from gradsieve.errors import GradsieveError
from gradsieve_tools.spot.nodes import Nodes, wait_for

COUNT = 2
KINDS = ("worker", "node", "notice")
LAST_STEPS = 10  # steps after the last fault
# Seconds: between two looks, until a generation has to be up, and from a notice to the kill
_LOOK, _PATIENCE, _GRACE = 0.1, 300.0, 5.0
_BEGINS = re.compile(rf"rank 0 of {COUNT} begins with step (\d+)")
_REACHED = re.compile(r"in step (\d+) failed after")
_FAILED = re.compile(r"[\w.]+(?:Error|Exception)\b")
_DIGEST = re.compile(r"digest (-?[0-9a-f]+)\n")


@dataclass(slots=True)
class Fault:
    kind: str
    # Seconds after the first generation had begun; 0: as soon as the fault before was recovered from
    at: float
    happened: float = -1.0
    saved: int = 0  # the step of the last checkpoint when it happened
    # The step with which the next generation began, and after how many seconds; None: the next fault came
    # before it had
    begins: int = 0
    seconds: float | None = None
    lost: int = 0  # steps that were taken again, by the error of a survivor, which names the step


def one_by_one(seed: int, workers: int, nodes: int) -> list[Fault]:
    kinds = ["worker"] * workers + ["node"] * nodes
    random.Random(seed).shuffle(kinds)
    return [Fault(kind, 0.0) for kind in kinds]


def by_chance(seed: int, hours: float, speed: float) -> list[Fault]:
    """A Poisson process a kind: a notice an hour, a worker and a node every second hour."""
    chance, faults = random.Random(seed), list[Fault]()
    for kind, an_hour in zip(KINDS, (0.5, 0.5, 1.0), strict=True):
        hour = chance.expovariate(an_hour)
        while hour < hours:
            faults.append(Fault(kind, 3600 * hour / speed))
            hour += chance.expovariate(an_hour)
    return sorted(faults, key=lambda fault: fault.at)


@dataclass(slots=True)
class Verdict:
    faults: list[Fault]
    steps: int = 0
    seconds: float = 0.0  # until the last fault was recovered from
    checkpoints: int = 0  # read back whole
    damaged: list[str] = field(default_factory=list)
    # why torchrun itself ended and all nodes were started again
    jobs: list[str] = field(default_factory=list)
    digest: str = ""
    undisturbed: str = ""

    @property
    def is_good(self) -> bool:
        return not self.damaged and self.digest == self.undisturbed and self.checkpoints > 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"bits_are_equal": self.digest == self.undisturbed}


class Campaign:
    """`script` is called as examples/restarts.py is, and says what that says."""

    def __init__(self, script: Path, folder: Path, faults: Sequence[Fault], seed: int) -> None:
        self._script, self._folder = script.resolve(), folder
        self._run = folder / "run"
        self._chance = random.Random(seed)
        self.verdict = Verdict(list(faults))
        self._read: set[str] = set()
        self._is_stopping = False

    def run(self) -> Iterator[Fault]:
        """Yield each fault when it was recovered from."""
        with self._nodes(self._run, 10**9, 0.05, "disturbed") as nodes:
            for _ in range(COUNT):
                nodes.start()
            self._until(lambda: _generations(nodes) != [], nodes)
            began = time.monotonic()
            yield from self._disturb(nodes, began)
            self.verdict.seconds = time.monotonic() - began
            self._is_stopping = True
            for node in nodes.running:
                node.give_notice()
            self._until(lambda: not nodes.running, nodes)
        self.verdict.steps = _saved(self._run) + LAST_STEPS
        self.verdict.digest = self._ended(self._run, "ended")
        self.verdict.undisturbed = self._ended(self._folder / "undisturbed", "undisturbed")

    def _nodes(self, run: Path, steps: int, step_seconds: float, name: str) -> Nodes:
        words = [str(self._script), str(run), "--steps", str(steps), "--save-every", "50"]
        return Nodes(self._folder / name, [*words, "--step-seconds", str(step_seconds)], str(COUNT))

    def _ended(self, run: Path, name: str) -> str:
        with self._nodes(run, self.verdict.steps, 0.0, name) as nodes:
            for _ in range(COUNT):
                nodes.start()
            if not wait_for(nodes.all, _PATIENCE + 0.1 * self.verdict.steps):
                raise GradsieveError(f"the training {name} did not end: {_tail(nodes)}")
            digests = {found for node in nodes.all for found in _DIGEST.findall(node.log)}
        return " ".join(sorted(digests))

    # -- what happens to the nodes ----------------------------------------------------------------------

    def _disturb(self, nodes: Nodes, began: float) -> Iterator[Fault]:
        faults = self.verdict.faults
        for fault, after in zip(faults, [*faults[1:], None], strict=True):
            self._wait_for(fault, nodes, began)
            fault.happened, fault.saved = time.monotonic() - began, _saved(self._run)
            before, said = len(_generations(nodes)), {id(node): len(node.log) for node in nodes.all}
            self._do(fault.kind, nodes)

            def is_over(before: int = before, after: Fault | None = after) -> bool:
                is_due = after is not None and 0 < after.at <= time.monotonic() - began
                return is_due or len(_generations(nodes)) > before

            self._until(is_over, nodes)
            fault.begins = fault.saved
            if len(generations := _generations(nodes)) > before:
                fault.begins, fault.seconds = generations[-1], time.monotonic() - began - fault.happened
            fresh = [node.log[said.get(id(node), 0) :] for node in nodes.all]
            reached = [int(step) for text in fresh for step in _REACHED.findall(text)]
            fault.lost = max(0, max(reached, default=0) - fault.begins)
            yield fault

    def _wait_for(self, fault: Fault, nodes: Nodes, began: float) -> None:
        if fault.at:
            self._wait(began + fault.at - time.monotonic())
            return
        saved = _saved(self._run)
        self._until(lambda: _saved(self._run) > saved, nodes)
        self._wait(self._chance.uniform(0.0, 2.0))

    def _do(self, kind: str, nodes: Nodes) -> None:
        node = self._chance.choice(nodes.running)
        if kind == "worker":
            self._until(node.kill_worker, nodes)
            return
        if kind == "notice":
            node.give_notice()
            deadline = time.monotonic() + _GRACE
            while node.is_running and time.monotonic() < deadline:
                self._wait(_LOOK)
        node.kill()
        self._wait(self._chance.uniform(0.0, 3.0))
        nodes.start()

    def _begin_anew(self, nodes: Nodes) -> None:
        """Start another rendezvous, as a scheduler would: an agent that fails closes it for all."""
        ended = [node for node in nodes.all[-COUNT - 1 :] if not node.is_running]
        said = [line for node in ended for line in node.log.splitlines() if _FAILED.match(line)]
        self.verdict.jobs.append("; ".join(said))
        nodes.begin_anew()
        for _ in range(COUNT):
            nodes.start()

    # -- looking ----------------------------------------------------------------------------------------

    def _until(self, what: Callable[[], bool], nodes: Nodes, seconds: float = _PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            if len(nodes.running) < COUNT and not self._is_stopping:
                self._begin_anew(nodes)
            if time.monotonic() > deadline:
                raise GradsieveError(f"the training did not come back in {seconds:.0f} s: {_tail(nodes)}")
            self._wait(_LOOK)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self._read_back()
            if (left := deadline - time.monotonic()) <= 0:
                return
            time.sleep(min(left, _LOOK))

    def _read_back(self) -> None:
        for manifest in sorted(self._run.glob("step-*/manifest.json")):
            if manifest.parent.name in self._read:
                continue
            self._read.add(manifest.parent.name)
            wrong = damage(manifest.parent)
            if wrong and manifest.exists():  # older ones are removed
                self.verdict.damaged.append(wrong)
            self.verdict.checkpoints += not wrong


def damage(folder: Path) -> str:
    """Return what is wrong with a checkpoint, or nothing."""
    try:
        manifest = files.read_manifest(folder)
        for rank in range(manifest.world):
            content = (folder / manifest.file_of(rank)).read_bytes()
            if (len(content), hashlib.sha256(content).hexdigest()) != manifest.expected(rank):
                return f"{folder.name}: the file of rank {rank} is not what the manifest says"
        if f"step-{manifest.step:06}" != folder.name:
            return f"{folder.name} is of step {manifest.step}"
    except (OSError, GradsieveError) as error:
        return f"{folder.name}: {error}"
    return ""


def _generations(nodes: Nodes) -> list[int]:
    return sorted(int(step) for node in nodes.all for step in _BEGINS.findall(node.log))


def _saved(run: Path) -> int:
    names = (path.parent.name for path in run.glob("step-*/manifest.json"))
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def _tail(nodes: Nodes) -> str:
    return "\n".join(node.log[-1500:] for node in nodes.all[-COUNT - 1 :])
