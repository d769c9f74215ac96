"""What a rank is doing, added to what it sends anyway, so that ranks which do different things find out.

    call     training goes on, or which call of the user's this is
    step     exchanges applied so far
    unit     which of the step's
    loads    how often another model was loaded into the parameters
    since    steps since the one with the last exchange

Two words are piggybacked on every exchange: a number from 0 to 15 made of these, and its square. If all P
ranks have the same h, the sums are P h and P h^2; if they do not, no rank sees both of these for its own h
(the mean of squares is above the square of the mean). So all ranks find it out, in the same exchange, and
only then they gather who does what. Sums of such numbers are exact in float32 for up to 70,000 ranks.

A rank without a step for a while says so in two more words: how many there are, and who, if it is one. One
more word counts the ranks that were given notice (`preemption.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from gradsieve.comm.ops import AllGather
from gradsieve.errors import MismatchError, list_ranks
from gradsieve.types import Program

CALLS = ("training", "flush()", "load_state_dict()", "save()", "load()")
IDLE = 10  # exchanges in a row without a step of this rank, from which on it says so
WORDS = 5


@dataclass(frozen=True, slots=True)
class Tag:
    call: int = 0  # place in CALLS
    step: int = 0
    unit: int = 0
    loads: int = 0
    since: int = 0

    @property
    def called(self) -> str:
        """Return the call in words; a peer's number need not be one of ours."""
        return CALLS[self.call] if 0 <= self.call < len(CALLS) else "an unknown call"

    @property
    def number(self) -> int:
        """Return a number by which ranks differ that differ in one part by less than 16: factors are odd."""
        return (self.call + 5 * self.step + 7 * self.unit + 11 * self.loads + 13 * self.since) % 16


def words(tag: Tag, rank: int, idle: int, has_notice: bool) -> list[float]:
    quiet = float(idle >= IDLE)
    return [tag.number, tag.number**2, quiet, quiet * rank, float(has_notice)]


def agree(tag: Tag, sums: Sequence[float], rank: int, world: int, device: torch.device) -> Program[None]:
    """Go on if all ranks do the same; otherwise find out who does what, and raise it on all of them."""
    if sums[0] == world * tag.number and sums[1] == world * tag.number**2:
        return
    mine = torch.tensor(astuple(tag), dtype=torch.int64, device=device)
    rows = (yield AllGather(mine)).tolist()
    tags = [Tag(*row) for row in rows]
    raise MismatchError(f"rank {rank}: {explain(tags)}")


def who_is_idle(sums: Sequence[float]) -> str:
    """Name the idle ranks by the third and fourth word; empty while all ranks take steps."""
    count, ranks = int(sums[2]), int(sums[3])
    if not count:
        return ""
    return f"rank {ranks}" if count == 1 else f"{count} ranks"


def is_notice_given(sums: Sequence[float]) -> bool:
    """Whether any rank was given notice, by the fifth word."""
    return sums[4] > 0.0


def explain(tags: Sequence[Tag]) -> str:
    """Say which call is missing on which rank, and what to do."""
    if len({tag.call for tag in tags}) > 1:
        return _explain_calls(tags)
    if len({tag.loads for tag in tags}) > 1:
        usual, odd = sides([tag.loads for tag in tags])
        return (
            f"a model was loaded into the parameters {_times(tags, odd)} on {list_ranks(odd)} and {usual} "
            "times on the other ranks: call the model's load_state_dict() on every rank, or on none"
        )
    if len({tag.step for tag in tags}) == 1 and len({tag.since for tag in tags}) > 1:
        usual, odd = sides([tag.since for tag in tags])
        where = ", ".join(f"rank {rank} {tags[rank].since}" for rank in odd[:8])
        return (
            f"ranks took different numbers of steps since exchange {tags[0].step}: {where}, the other ranks "
            f"{usual}. Some had more batches than the others: give all ranks as many (drop_last=True)"
        )
    usual, odd = sides([tag.step for tag in tags])
    where = ", ".join(f"rank {rank} at step {tags[rank].step}" for rank in odd[:8])
    return (
        f"{where or 'units differ'}, the other ranks at step {usual}: they loaded checkpoints of different "
        "steps, or some were restarted; start all ranks from one checkpoint"
    )


def _explain_calls(tags: Sequence[Tag]) -> str:
    training = [rank for rank, tag in enumerate(tags) if not tag.call]
    calling = [rank for rank, tag in enumerate(tags) if tag.call]
    calls = sorted({tag.called for tag in tags if tag.call})
    if not training:
        each = ", ".join(f"rank {rank} {tag.called}" for rank, tag in list(enumerate(tags))[:8])
        return f"after step {tags[0].step} ranks make different calls ({each}): make the same on all of them"
    busy = list_ranks(training)
    return (
        f"{list_ranks(calling)} called {' and '.join(calls)} after step {tags[calling[0]].step} while {busy} "
        f"went on training: call it on every rank, or on none. Where all ranks do call it, {busy} had more "
        "batches than the others: give all ranks as many (drop_last=True)"
    )


def sides(values: Sequence[int]) -> tuple[int, list[int]]:
    """Return the usual value among ranks, and the ranks that have another one."""
    usual = Counter(values).most_common(1)[0][0]
    return usual, [rank for rank, value in enumerate(values) if value != usual]


def _times(tags: Sequence[Tag], ranks: Sequence[int]) -> str:
    return " and ".join(sorted({f"{tags[rank].loads} times" for rank in ranks}))
