"""What every rank must have done, said and kept after a fault; and figures over many of them."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from gradsieve_tools.faults.fleet import Ending
from gradsieve_tools.faults.kinds import KINDS, Fault
from gradsieve_tools.faults.trained import PEER_FAILED, Task

DEATH_SECONDS = 6.0
"""Within which all survivors know of a death, whatever the deadline."""
STALL_SECONDS = 1.5
"""Beyond the deadline, within which all others know of a stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One fault and what came of it."""

    scheme: str
    seed: int
    kind: str
    rank: int
    step: int
    op: int
    op_name: str
    deadline: float
    detection_ms: float | None
    """Until the last survivor had its error."""
    exit_codes: list[int | None]
    outcome: str
    """`named`, or what is wrong."""
    digest: str
    """Of what survivors share."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def verdict_of(
    fault: Fault, task: Task, endings: Sequence[Ending], clean: Sequence[int], op_name: str
) -> Line:
    """`clean`: digests after every step of an undisturbed run."""
    fired = endings[fault.rank].message("fired").get("at")
    wrong = [] if fired is not None else ["the fault did not happen"]
    survivors = {rank: ending for rank, ending in enumerate(endings) if rank != fault.rank}
    allowed = DEATH_SECONDS if fault.is_death else task.deadline + STALL_SECONDS
    seconds = []
    for rank, ending in survivors.items():
        wrong += [f"rank {rank}: {each}" for each in _faults_of(ending, fault, clean)]
        if fired is not None and "at" in ending.message("ended"):
            seconds.append(ending.message("ended")["at"] - fired)
    if seconds and max(seconds) > allowed:
        wrong.append(f"took {max(seconds):.1f} s, and {allowed:g} are allowed")
    wrong += [f"rank {fault.rank}: {each}" for each in _faults_of_victim(endings[fault.rank], fault)]
    digests = {
        ending.message("ended")["digests"][-1] for ending in survivors.values() if ending.message("ended")
    }
    return Line(
        scheme=task.scheme,
        seed=task.seed,
        kind=fault.kind,
        rank=fault.rank,
        step=fault.step,
        op=fault.op,
        op_name=op_name,
        deadline=task.deadline,
        detection_ms=longest_ms(seconds),
        exit_codes=[ending.exit_code for ending in endings],
        outcome="; ".join(wrong) or "named",
        digest=as_hex(digests),
    )


def _faults_of(ending: Ending, fault: Fault, clean: Sequence[int]) -> list[str]:
    """Of a survivor, in words."""
    if ending.exit_code is None:
        return [f"hung at {ending.stacks[-800:]}"]
    message = ending.message("ended")
    wrong = [] if ending.exit_code == PEER_FAILED else [f"exit code {ending.exit_code}"]
    if message.get("error") != "PeerError":
        return [*wrong, f"raised {message.get('error') or 'nothing'}: {message.get('said')}"]
    if message["ranks"] != [fault.rank]:
        wrong.append(f"blames {message['ranks']}: {message['said']}")
    if not re.search(rf"\w+ of .* for unit \d+ of \d+ in step {message['step']} failed", message["said"]):
        wrong.append(f"names no op or step: {message['said']}")
    if not message["kept"]:
        wrong.append("the failed step changed something")
    # A rank that needed nothing more of the victim may have finished the step that the others lost.
    if (
        message["step"] not in (fault.step, fault.step + 1)
        or message["digests"][-1] != clean[message["step"]]
    ):
        wrong.append(f"is at step {message['step']} with another model than an undisturbed run")
    if message["threads"] or message["connections"]:
        wrong.append(f"left {message['threads']} threads and {message['connections']} connections")
    return wrong


def _faults_of_victim(ending: Ending, fault: Fault) -> list[str]:
    if fault.is_death:
        return wrong_code(ending, KINDS[fault.kind])
    if ending.exit_code is None:
        return [f"hung after it was continued, at {ending.stacks[-800:]}"]
    message = ending.message("ended")
    if ending.exit_code != PEER_FAILED or fault.rank not in message.get("ranks", ()):
        return [f"continued, it ended with code {ending.exit_code}: {message.get('said')}"]
    return []


def summary(lines: Sequence[Line], seconds: float) -> dict[str, Any]:
    """Counts, and times until all survivors knew; those of stalls beyond their deadline."""
    deaths = [line.detection_ms for line in lines if KINDS[line.kind] is not None]
    stalls = [
        None if line.detection_ms is None else line.detection_ms - 1000 * line.deadline
        for line in lines
        if KINDS[line.kind] is None
    ]
    return {
        "faults": len(lines),
        "named": sum(line.outcome == "named" for line in lines),
        "hung": sum("hung" in line.outcome for line in lines),
        "deaths_ms": quantiles(deaths),
        "stalls_beyond_deadline_ms": quantiles(stalls),
        "seconds": round(seconds, 1),
    }


# -- what verdicts on other faults take as well ------------------------------------------------------------


def wrong_code(ending: Ending, expected: int | None) -> list[str]:
    return [] if ending.exit_code == expected else [f"exit code {ending.exit_code}, not {expected}"]


def longest_ms(seconds: Sequence[float]) -> float | None:
    return round(1000 * max(seconds), 1) if seconds else None


def as_hex(digests: Set[int]) -> str:
    """One, unless ranks differ."""
    return " ".join(f"{each % (1 << 64):016x}" for each in sorted(digests))


def quantiles(times: Sequence[float | None]) -> dict[str, float]:
    known = sorted(each for each in times if each is not None)
    if not known:
        return {}
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(known[min(len(known) - 1, int(share * len(known)))], 1) for name, share in at.items()}
