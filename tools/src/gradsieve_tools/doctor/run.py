"""The examination, on every rank: facts, then the group, then what it does. Rank 0 has the report."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from gradsieve.comm import sockets
from gradsieve.comm.links import Links
from gradsieve.errors import GradsieveError
from gradsieve_tools.doctor import evaluate, model, pairs, ring, speed
from gradsieve_tools.doctor import facts as facts_of
from gradsieve_tools.doctor.answers import Answer, facts_from
from gradsieve_tools.doctor.evaluate_interfaces import missing
from gradsieve_tools.doctor.facts import Facts
from gradsieve_tools.doctor.findings import Finding, Measured, sorted_by_severity
from gradsieve_tools.doctor.meeting import Board
from gradsieve_tools.doctor.model import ModelFigures

CONNECTING = timedelta(seconds=60)
Tell = Callable[[str], None]  # hears what is being done


@dataclass(frozen=True, slots=True)
class Report:
    world: int
    facts: list[Facts]  # facts of ranks that reported
    findings: list[Finding]
    measured: Measured = field(default_factory=Measured)
    answers: Mapping[int, Answer] = field(default_factory=dict)


def examine(meeting: Board, model_spec: str | None, timeout: float | None, tell: Tell) -> Report | None:
    own = facts_of.collect(meeting.rank, os.environ.get("MASTER_ADDR", "127.0.0.1"))
    meeting.tell("facts", asdict(own))
    facts: list[Facts] = []
    findings: list[Finding] = []
    if meeting.rank == 0:
        tell("waiting for all ranks")
        facts = [facts_from(rank, said) for rank, said in sorted(meeting.hear("facts").items())]
        findings = evaluate.before(facts, meeting.world)
    if not meeting.decide("measure", not findings):
        return Report(meeting.world, facts, findings) if meeting.rank == 0 else None
    meeting.tell("answer", _answer(meeting, own, model_spec, tell))
    if meeting.rank:
        return None
    answers = {rank: Answer.read(rank, meeting.world, said) for rank, said in meeting.hear("answer").items()}
    measured = put_together(answers, meeting.world)
    lost = missing([each for each in facts if each.rank in answers], meeting.world)
    found = sorted_by_severity([*lost, *evaluate.after(facts, measured, timeout)])
    return Report(meeting.world, facts, found, measured, answers)


def leave(meeting: Board) -> None:
    """Rank 0 last: the store may be its own."""
    with contextlib.suppress(RuntimeError, GradsieveError):
        if meeting.rank:
            meeting.decide("done")
            meeting.tell("bye", True)
        else:
            meeting.tell("bye", True)
            meeting.decide("done", True)
            meeting.hear("bye")


def put_together(answers: Mapping[int, Answer], world: int) -> Measured:
    well = {rank: answer for rank, answer in answers.items() if not answer.error}
    models = [answer.model for answer in well.values() if answer.model is not None]
    return Measured(
        latency=pairs.matrix(world, {rank: each.latency for rank, each in well.items()}, True),
        bandwidth=pairs.matrix(world, {rank: each.incoming for rank, each in well.items()}, False),
        failed={rank: each.failed for rank, each in well.items() if each.failed},
        pace={rank: each.pace for rank, each in well.items()},
        connections={rank: each.connections for rank, each in well.items()},
        errors={rank: answer.error for rank, answer in answers.items() if answer.error},
        ring=next((each.ring for each in well.values()), None),
        model=_slowest(models),
    )


def _slowest(models: list[ModelFigures]) -> ModelFigures | None:
    return max(models, key=lambda each: (each.forward or 0.0) + (each.backward or 0.0), default=None)


def _answer(meeting: Board, own: Facts, model_spec: str | None, tell: Tell) -> dict[str, Any]:
    """Measure on this rank; an error is reported, and the others do not wait for it."""
    try:
        connections = _connect(meeting, own, tell)
    except (RuntimeError, ValueError) as error:
        return {"error": f"no process group within {CONNECTING.seconds} s: {str(error)[:300]}"}
    try:
        tell("speed of hosts")
        meeting.gather("speed")
        here = speed.measure()
        seen = pairs.measure(meeting.rank, meeting.world, meeting.gather, tell)
        figures = None
        if model_spec is not None:
            tell("the model")
            meeting.gather("model")
            figures = model.measure(*model.build(model_spec))
        around = _around(meeting, tell)
        meeting.gather("end")
    except GradsieveError as error:
        return {"error": str(error)}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return {
        **asdict(seen),
        **asdict(here),
        "connections": connections,
        "ring": None if around is None else asdict(around),
        "model": None if figures is None else asdict(figures),
        "error": "",
    }


def _around(meeting: Board, tell: Tell) -> Links | None:
    """Return None if not all ranks answer: the pairs' measurements show that."""
    tell("a sum over all ranks")
    if not meeting.gather("ring"):
        return None
    try:
        return ring.measure(meeting.world)
    except RuntimeError:
        return None


def _own_address(fd: int) -> str:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
        return str(one.getsockname()[0]).removeprefix("::ffff:")
    return ""


def _connect(meeting: Board, own: Facts, tell: Tell) -> dict[str, int]:
    """Make the group; how many of its connections run over which interface, by their sockets."""
    if meeting.world == 1:
        return {}
    tell("making the process group")
    port = int(os.environ.get("MASTER_PORT", "0"))
    earlier = sockets.connected(port)
    dist.init_process_group(
        "gloo",
        store=PrefixStore("group", meeting.store),
        rank=meeting.rank,
        world_size=meeting.world,
        timeout=CONNECTING,
    )
    counts: dict[str, int] = {}
    for fd, inode in sockets.connected(port).items():
        if earlier.get(fd) != inode and (address := _own_address(fd)):
            at = own.having(address)
            name = at.name if at is not None else address
            counts[name] = counts.get(name, 0) + 1
    return counts
