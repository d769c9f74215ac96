"""Ranks that start, load or end with different things are named, with what differs.

A few numbers of each rank are gathered: a hash for every thing that has to be the same. Only where they
differ a second gather asks for the words behind the hash.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather
from gradsieve.errors import DivergenceError, MismatchError, list_ranks, printable
from gradsieve.feedback.digest import digest
from gradsieve.pipeline.tags import sides
from gradsieve.types import Program

_TEXT = 240
"""Bytes of a text that are sent."""
_RANKS = 16
"""How many are listed by number."""


def agree_on(things: Mapping[str, str], rank: int, device: torch.device) -> Program[None]:
    """Raise MismatchError on all ranks unless every thing is the same text on all of them."""
    mine = torch.tensor([_hash(text) for text in things.values()], dtype=torch.int64, device=device)
    rows = yield AllGather(mine)
    for column, (name, text) in enumerate(things.items()):
        hashes = rows[:, column].tolist()
        if len(set(hashes)) == 1:
            continue
        texts = yield AllGather(as_bytes(text, device))
        raise MismatchError(
            f"rank {rank}: ranks differ in {name}: {_grouped([as_text(row) for row in texts])}. Give all "
            "ranks the same"
        )


def agree_on_values(tensors: Mapping[str, Tensor], rank: int, device: torch.device) -> Program[None]:
    """Raise DivergenceError on all ranks unless these tensors have the same bits on all of them."""
    where = yield from differing(tensors, device)
    if where:
        raise DivergenceError(
            f"rank {rank}: ranks start with different weights; {where}. Seed all ranks alike, load the same "
            "checkpoint on all of them, or let DistributedDataParallel broadcast rank 0's"
        )


def differing(tensors: Mapping[str, Tensor], device: torch.device) -> Program[str]:
    """Which of these tensors have other bits on which ranks, in words; nothing where none has."""
    mine = torch.cat([digest([tensor]) for tensor in tensors.values()]).to(device)
    rows = yield AllGather(mine)
    same = (rows == rows[0]).all(0).tolist()
    names = [name for name, equal in zip(tensors, same, strict=True) if not equal]
    if not names:
        return ""
    odd = against_the_majority(rows[:, same.index(False)].tolist())
    some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{odd}, in {len(names)} of {len(same)} tensors ({some})"


def against_the_majority(hashes: Sequence[int]) -> str:
    """Who stands there, in words."""
    (_, most), *others = Counter(hashes).most_common()
    if others and others[0][1] == most:
        return "there is no majority to tell which"
    _, odd = sides(hashes)
    some = str(odd) if len(odd) <= _RANKS else f"{str(odd[:_RANKS])[:-1]}, ...]"
    return f"against the majority stand ranks {some}"


def _grouped(texts: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(
        f"{list_ranks(who)} {'has' if len(who) == 1 else 'have'} {text}"
        for text, who in list(ranks.items())[:4]
    )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def as_bytes(text: str, device: torch.device) -> Tensor:
    """As many of them on every rank, so that they can be gathered."""
    coded = text.encode()[:_TEXT].ljust(_TEXT, b"\0")
    return torch.tensor(list(coded), dtype=torch.uint8, device=device)


def as_text(row: Tensor) -> str:
    return printable(bytes(row.tolist()).rstrip(b"\0"))
