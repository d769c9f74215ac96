"""What every rank must have done, said and kept after a fault; and figures over many of them."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradsieve.checkpoint import files
from gradsieve.errors import Malformed
from gradsieve_tools.chaos.fleet import DONE, FAILED, PEER_FAILED, Ending
from gradsieve_tools.chaos.kinds import DEATHS, KINDS, Must, Needs
from gradsieve_tools.chaos.schedule import Chance

# digests of the shared state and of all a rank has, by step and rank of an undisturbed run
Clean = Mapping[int, Sequence[Sequence[int]]]
NAMED, HARMLESS, SILENT, HUNG = "named", "harmless", "silent loss", "hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    number: int
    seed: int
    scheme: str
    kind: str
    rank: int
    step: int  # step of the training; -1 while loading
    op: str
    delay_ms: float
    deadline: float
    detection_ms: float | None  # until the last survivor had its error
    exit_codes: list[int | None]
    errors: list[str]
    outcome: str  # `named`, `harmless`, or what is wrong
    digest: str  # digest of the shared state after the last reported step
    resumed_at: int  # step of the checkpoint that the episode loaded
    kept_at: int  # step of the checkpoint it left and that was read back; -1: unreadable
    acknowledged_at: int  # step of the last save that returned to a rank
    lost_steps: int  # steps after it, to be taken again
    lost_mass: float  # norm over ranks of the residuals that no checkpoint has

    @property
    def is_good(self) -> bool:
        return self.outcome in (NAMED, HARMLESS)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def digests_of(ending: Ending) -> dict[int, list[int]]:
    """Return digests of the shared state and of all that the rank has, by step."""
    return {int(step): each for step, each in ending.message("step").get("digests", {}).items()}


def is_resumed(endings: Sequence[Ending], clean: Clean, at: int) -> bool:
    """Return whether all ranks loaded what an undisturbed run had."""
    return all(digests_of(ending).get(at) == list(clean[at][rank]) for rank, ending in enumerate(endings))


@dataclass(frozen=True, slots=True)
class Kept:
    """The checkpoint that an episode left."""

    at: int
    problem: str = ""


def read_back(folder: Path) -> Kept:
    """Read every file of a checkpoint, with its size and SHA-256."""
    try:
        manifest = files.read_manifest(folder)
        for rank in range(manifest.world):
            files.read_shard(folder, manifest, rank)
    except Malformed as error:
        return Kept(-1, str(error))
    return Kept(manifest.step)


def acknowledged(endings: Sequence[Ending], resumed_at: int) -> int:
    """The step of the last save that returned, on whichever rank: what it began with was saved before."""
    steps: list[int] = [ending.message("saved").get("step", resumed_at) for ending in endings]
    return max(resumed_at, *steps)


def verdict_of(
    chance: Chance,
    seed: int,
    endings: Sequence[Ending],
    clean: Clean,
    resumed_at: int,
    kept: Kept,
    successors: Sequence[Ending] = (),
) -> Line:
    """`successors`: ranks that took up the training while one of these was stopped."""
    fired = endings[chance.rank].message("fired")
    kept_at, saved_at = kept.at, acknowledged([*endings, *successors], resumed_at)
    wrong = _wrong_with_checkpoint(kept, saved_at)
    if KINDS[chance.kind].must is Must.FENCED:
        wrong += _wrong_with_successors(successors, clean)
    outcome = _outcome(chance, endings, clean, kept_at)
    if wrong:
        outcome = "; ".join([*wrong, *([] if outcome in (NAMED, HARMLESS) else [outcome])])
    others = [ending.message("ended") for rank, ending in enumerate(endings) if rank != chance.rank]
    seconds = [message["at"] - fired["at"] for message in others if fired and message.get("error")]
    detection = round(1000 * max(seconds), 1) if seconds else None
    last = [ending.message("step") for ending in endings]
    farthest = max([message.get("step", resumed_at) for message in last])
    ended = any(ending.exit_code != DONE for ending in endings)
    reached = {digests_of(ending)[farthest][0] for ending in endings if farthest in digests_of(ending)}
    return Line(
        number=chance.number,
        seed=seed,
        scheme=chance.scheme,
        kind=chance.kind,
        rank=chance.rank,
        step=fired.get("step", -1),
        op=fired.get("op", ""),
        delay_ms=round(1000 * chance.delay, 1),
        deadline=chance.deadline,
        detection_ms=detection,
        exit_codes=[ending.exit_code for ending in endings],
        errors=[ending.message("ended").get("said", "")[:400] for ending in endings],
        outcome=outcome,
        digest=" ".join(f"{each % (1 << 64):016x}" for each in sorted(reached)),
        resumed_at=resumed_at,
        kept_at=kept_at,
        acknowledged_at=saved_at,
        lost_steps=max(0, farthest - kept_at) if ended else 0,
        lost_mass=math.hypot(*(message.get("residual", 0.0) for message in last))
        if ended and farthest > kept_at
        else 0.0,
    )


def _wrong_code(ending: Ending, expected: int) -> list[str]:
    return [] if ending.exit_code == expected else [f"exit code {ending.exit_code}, not {expected}"]


def _wrong_with_checkpoint(kept: Kept, saved_at: int) -> list[str]:
    if kept.problem:
        return [f"the checkpoint of step {saved_at} was acknowledged and cannot be read: {kept.problem}"]
    if kept.at < saved_at:
        return [f"the checkpoint of step {saved_at} was acknowledged, and the folder holds step {kept.at}"]
    return []


def _wrong_with_successors(successors: Sequence[Ending], clean: Clean) -> list[str]:
    codes = [ending.exit_code for ending in successors]
    if not codes or any(codes):
        return [
            f"successors ended with {codes}: {[ending.message('ended').get('said') for ending in successors]}"
        ]
    return _silent_losses(successors, clean, max(clean))


def _silent_losses(endings: Sequence[Ending], clean: Clean, until: int) -> list[str]:
    """The first of each rank, of steps up to that one."""
    wrong = []
    for rank, ending in enumerate(endings):
        for step, each in digests_of(ending).items():
            if step <= until and each != list(clean[step][rank]):
                what = "the shared model" if each[0] != clean[step][rank][0] else "what the rank has"
                wrong.append(f"{SILENT}: rank {rank} took step {step} and {what} is another than undisturbed")
                break
    return wrong


def _outcome(chance: Chance, endings: Sequence[Ending], clean: Clean, kept_at: int) -> str:
    hung = [
        f"rank {rank} {HUNG} at {e.stacks[-1500:]}" for rank, e in enumerate(endings) if e.exit_code is None
    ]
    if hung:
        return "; ".join(hung)
    fired, is_done = (
        endings[chance.rank].message("fired"),
        all(ending.exit_code == DONE for ending in endings),
    )
    wrong = [] if fired else ["the fault did not happen"]
    # Ranks whose replicas differ need not know before they save.
    are_apart = chance.must is Must.DIVERGE and not is_done
    wrong += _silent_losses(endings, clean, fired.get("step", -1) if are_apart else max(clean))
    if are_apart and kept_at > fired.get("step", -1):
        wrong.append(
            f"{SILENT}: replicas differed from step {fired['step']} on, and step {kept_at} was saved"
        )
    for rank, ending in enumerate(endings):
        message = ending.message("ended")
        # The watch of a rank that is cut off waits for the store as long as the store's time-out is.
        is_cut_off = rank == chance.rank and KINDS[chance.kind].needs is Needs.LINKS
        if (message.get("threads") and not is_cut_off) or message.get("connections"):
            wrong.append(
                f"rank {rank} left {message['threads']} threads, {message['connections']} connections"
            )
        if not message.get("kept", True):
            wrong.append(f"rank {rank}: the failed step changed something")
    wrong += [
        f"rank {rank}: {each}" for rank, e in enumerate(endings) for each in _unsaid(e, chance, kept_at)
    ]
    if not wrong and is_done:
        return HARMLESS if chance.must in _MAY_PASS or chance.delay > 0.0 else "nothing came of it"
    is_over = _is_over(chance, endings, kept_at)
    for rank, ending in enumerate(endings):
        if rank == chance.rank or not is_over:
            check = _wrong_with_victim if rank == chance.rank else _wrong_with_other
            wrong += [f"rank {rank}: {each}" for each in check(ending, chance, endings)]
    return "; ".join(wrong) or (HARMLESS if is_over else NAMED)


_UNDISTURBED = (Must.GO_ON, Must.SURVIVE, Must.NOTICE)
_MAY_PASS = (*_UNDISTURBED, Must.DAMAGE, Must.DIVERGE)


def _unsaid(ending: Ending, chance: Chance, kept_at: int) -> list[str]:
    """Return what every rank has to report, also where none fails."""
    if chance.must is Must.SURVIVE and not ending.message("refused"):
        return ["refused nothing"]
    if chance.must is Must.NOTICE and ending.message("left").get("step") != kept_at:
        return [f"left after step {ending.message('left').get('step')}, and step {kept_at} was saved"]
    return []


def _is_over(chance: Chance, endings: Sequence[Ending], kept_at: int) -> bool:
    """Return whether a delayed fault came after all ranks had saved their last step."""
    others = [ending for rank, ending in enumerate(endings) if rank != chance.rank]
    is_saved = all(ending.message("step").get("step") == kept_at for ending in endings)
    return chance.delay > 0.0 and is_saved and all(ending.exit_code == DONE for ending in others)


def _wrong_with_other(ending: Ending, chance: Chance, endings: Sequence[Ending]) -> list[str]:
    message = ending.message("ended")
    error, said = message.get("error"), message.get("said", "")
    if chance.must in _UNDISTURBED:
        return [f"failed, and need not: {said}"] if ending.exit_code != DONE else []
    if not error:
        return [f"exit code {ending.exit_code}, no error of gradsieve's"]
    if chance.must is Must.DIFFERENT:
        if ending.exit_code == DONE:
            return ["began"]
        is_said = error == "MismatchError" and "differ in the version of gradsieve" in said
        return [] if is_said else [f"raised {error}: {said}"]
    wrong = [] if re.search(r"step \d+", said) else [f"names no step: {said}"]
    at = endings[chance.rank].message("fired").get("at")
    if at is not None and message["at"] - at > chance.allowed:
        wrong.append(f"took {message['at'] - at:.1f} s, and {chance.allowed:g} are allowed")
    if chance.must is Must.DISK:
        return wrong if "No space left" in said else [*wrong, f"does not name the disk: {said}"]
    if chance.must is Must.DAMAGE:
        named = error in ("PeerError", "Malformed", "MismatchError", "DivergenceError")
        return wrong if named else [*wrong, f"raised {error}: {said}"]
    if chance.must is Must.DIVERGE:
        return wrong if error == "DivergenceError" else [*wrong, f"raised {error}: {said}"]
    if error != "PeerError" or ending.exit_code != PEER_FAILED:
        return [*wrong, f"raised {error}: {said}"]
    if not re.search(r"\w+ of .* for .* failed after", said):
        wrong.append(f"names no op: {said}")
    if chance.must is not Must.CUT and message["ranks"] != [chance.rank]:
        wrong.append(f"blames {message['ranks']}: {said}")
    return wrong


def _wrong_with_victim(ending: Ending, chance: Chance, endings: Sequence[Ending]) -> list[str]:
    match chance.must:
        case Must.DEATH:
            return _wrong_code(ending, DEATHS.get(chance.kind, -signal.SIGKILL))
        case Must.VANISH:
            return _wrong_code(ending, -signal.SIGKILL)
        case Must.FENCED if ending.message("saved").get("step") == ending.message("fired").get("step"):
            return ["its save returned, after its successors'"]
        case Must.FAIL:
            return _wrong_code(ending, FAILED)
        case Must.STALL | Must.FENCED:
            named = ending.exit_code == PEER_FAILED
            return (
                []
                if named
                else [f"ended with code {ending.exit_code}: {ending.message('ended').get('said')}"]
            )
        case _:
            return _wrong_with_other(ending, chance, endings)


def _quantiles(times: Sequence[float | None]) -> dict[str, float]:
    known = sorted(each for each in times if each is not None)
    if not known:
        return {}
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(known[min(len(known) - 1, int(share * len(known)))], 1) for name, share in at.items()}


def summary(lines: Sequence[Line], recovered: Mapping[str, int], seconds: float) -> dict[str, Any]:
    """Counts, by kind as well; times until all others knew, those of deaths apart."""
    kinds: dict[str, dict[str, Any]] = {}
    for kind in sorted({line.kind for line in lines}):
        own = [line for line in lines if line.kind == kind]
        kinds[kind] = {
            "faults": len(own),
            NAMED: sum(line.outcome == NAMED for line in own),
            HARMLESS: sum(line.outcome == HARMLESS for line in own),
            "recovered": recovered.get(kind, 0),
            "wrong": sum(not line.is_good for line in own),
            "silent": sum(SILENT in line.outcome for line in own),
            "hung": sum(HUNG in line.outcome for line in own),
            "lost_steps": sum(line.lost_steps for line in own),
            "lost_mass": round(sum(line.lost_mass for line in own), 3),
            "detection_ms": _quantiles([line.detection_ms for line in own]),
        }
    deaths = [line.detection_ms for line in lines if KINDS[line.kind].must is Must.DEATH]
    totals = {key: sum(each[key] for each in kinds.values()) for key in (NAMED, HARMLESS, "recovered")}
    totals |= {key: sum(each[key] for each in kinds.values()) for key in ("wrong", "silent", "hung")}
    return {
        "faults": len(lines),
        **totals,
        "read_back": sum(line.kept_at >= line.acknowledged_at for line in lines),
        "deaths_ms": _quantiles(deaths),
        "seconds": round(seconds, 1),
        "kinds": kinds,
    }
