"""Check that ranks are alike: settings, layout and weights when they start, replicas while they train.

Ranks gather hashes, a few bytes each. Only where these differ do they gather more, to name ranks and what
differs.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsieve import version, wire
from gradsieve.comm.ops import AllGather
from gradsieve.errors import ConfigError, DivergenceError, MismatchError, list_ranks, printable
from gradsieve.pipeline.tags import sides
from gradsieve.replica import Replica
from gradsieve.types import Program, fields_to_tensors, replicated_fields

_log = logging.getLogger("gradsieve")

_TEXT_BYTES = 240  # of a text that is gathered
_MOST_NAMED = 16  # ranks that are listed by number
_RATES = {"learning rates": "lr", "weight decay": "weight_decay", "betas": "betas", "momentum": "momentum"}
_CHUNK = 1 << 17
# Odd: multiplying by them loses no bit, and the shifts in between carry high bits down.
_MIX, _PLACE = 0x2545F4914F6CDD1D, 0x1E3779B97F4A7C15


# -- at the start ---------------------------------------------------------------------------------------


def start_alike(replica: Replica) -> None:
    """Raise on all ranks unless they were given the same settings, layout and weights, and optimizers that
    step this model."""
    rank, device = replica.rank, replica.device
    settings = _settings(replica)
    replica.engine.run(_agree(settings, rank, device), "the comparison of settings", device)
    weights = {name: parameter.detach() for name, parameter in replica.parameters.items()}
    where = replica.engine.run(differing(weights, device), "the comparison of weights", device)
    if where:
        raise DivergenceError(
            f"rank {rank}: ranks start with different weights; {where}. Seed all ranks alike, load the same "
            "checkpoint on all of them, or let DistributedDataParallel broadcast rank 0's"
        )
    _refuse_others(replica)


def _settings(replica: Replica) -> dict[str, str]:
    """Return what has to be the same on all ranks, as text."""
    units, optimizers = replica.pipeline.units, replica.optimizers
    layout = repr([(unit.is_dense, [(slot.name, slot.numel) for slot in unit.slots]) for unit in units])
    elements = sum(slot.numel for unit in units for slot in unit.slots)
    settings = {
        "the version of gradsieve": version.VERSION,
        "the version of gradsieve's messages": str(wire.VERSION),
        "scheme": type(replica.scheme).__name__,
        "density": f"{replica.scheme.density:g}",
        "the scheme's settings": repr(replica.scheme),
        "exchange": replica.settings.describe(),
        "bits": str(replica.fixed and replica.fixed.bits),
        "the model": f"{len(replica.parameters)} parameters of {elements} elements, laid out as {layout}",
        "types": ", ".join(sorted({str(p.dtype) for p in replica.parameters.values()})),
        "optimizers": " and ".join(
            f"{type(optimizer).__name__} with {_count(replica.held, optimizer)} of the model's parameters in "
            f"{len(optimizer.param_groups)} groups"
            for optimizer in optimizers
        ),
    }
    if not replica.is_elastic:  # a replica that joins later starts at another rate of its schedule
        settings |= {name: _of_groups(optimizers, key) for name, key in _RATES.items()}
    return settings


def _agree(settings: Mapping[str, str], rank: int, device: torch.device) -> Program[None]:
    hashes = [hash_of(text) for text in settings.values()]
    rows = yield AllGather(torch.tensor(hashes, dtype=torch.int64, device=device))
    for column, (name, text) in enumerate(settings.items()):
        if len(set(rows[:, column].tolist())) > 1:
            texts = yield AllGather(as_bytes(text, device))
            ranks: dict[str, list[int]] = {}
            for number, row in enumerate(texts):
                ranks.setdefault(as_text(row), []).append(number)
            answers = [
                f"{list_ranks(who)} {'has' if len(who) == 1 else 'have'} {text}"
                for text, who in ranks.items()
            ]
            raise MismatchError(
                f"rank {rank}: ranks differ in {name}: {'; '.join(answers[:4])}. Give all ranks the same"
            )


def _refuse_others(replica: Replica) -> None:
    """Refuse optimizers of another model: after the comparison, and so on all ranks alike."""
    for place, optimizer in enumerate(replica.optimizers):
        if not _count(replica.held, optimizer):
            which = type(optimizer).__name__ + (f" (number {place})" if len(replica.optimizers) > 1 else "")
            raise ConfigError(
                f"rank {replica.rank}: {which} has none of the {len(replica.held)} parameters of this model "
                "that are trained: make it of model.parameters(), after the model was replaced or moved for "
                "the last time, and give attach() only optimizers that step this model"
            )


def uncovered(parameters: Mapping[str, Tensor], optimizers: Sequence[Any]) -> list[str]:
    """Return the names of parameters that none of these optimizers steps."""
    covered = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return [name for name, parameter in parameters.items() if id(parameter) not in covered]


def _count(parameters: Mapping[str, Tensor], optimizer: Any) -> int:
    return len(parameters) - len(uncovered(parameters, [optimizer]))


def _of_groups(optimizers: Sequence[Any], key: str) -> str:
    values = [group.get(key) for optimizer in optimizers for group in optimizer.param_groups]
    return str([float(value) if isinstance(value, int | float | Tensor) else value for value in values])


# -- while they train -----------------------------------------------------------------------------------


def compare(replica: Replica) -> None:
    """Raise DivergenceError on all ranks unless everything replicated has the same bits on all of them.

    Learning rates that differ are only warned of: where a rank skips a step alone, its schedule may, too.
    """
    what = f"the comparison of replicas after step {replica.pipeline.step}"
    replica.engine.run(_compared(replica), what, replica.device)


def _compared(replica: Replica) -> Program[None]:
    mine, rates = replicated(replica), hash_of(_of_groups(replica.optimizers, "lr"))
    hashes = [int(digest(mine.values())), rates]
    rows = yield AllGather(torch.tensor(hashes, dtype=torch.int64, device=replica.device))
    digests, rates_of_all = rows.T.tolist()
    if len(set(digests)) > 1:
        where = yield from differing(mine, replica.device)
        raise DivergenceError(
            f"rank {replica.rank}: replicas differ after step {replica.pipeline.step}; {where}. Something "
            "outside the exchange changed parameters or state on some ranks only (rank-dependent code, a "
            "partly loaded checkpoint). Restart all ranks from one checkpoint."
        )
    if len(set(rates_of_all)) > 1 and replica.rank == 0:
        odd = against_the_majority(rates_of_all)
        _log.warning("step %d: learning rates differ between ranks; %s", replica.pipeline.step, odd)


def replicated(replica: Replica) -> dict[str, Tensor]:
    """Return what has the same bits on all ranks, by names for messages."""
    pipeline = replica.pipeline
    tensors, figures = pipeline.replicated()
    numbers = [float(pipeline.step), *figures]
    tensors["step and figures"] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    for index, state in enumerate(pipeline.states):
        fields = fields_to_tensors(state)
        of_unit = f"of unit {index}" if len(pipeline.states) > 1 else "of the scheme"
        tensors |= {f"{name} {of_unit}": fields[name] for name in replicated_fields(state)}
    return tensors


# -- hashes and texts -----------------------------------------------------------------------------------


def differing(tensors: Mapping[str, Tensor], device: torch.device) -> Program[str]:
    """Say which of these tensors have other bits on which ranks; return an empty text if none has."""
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
    """Say which ranks have another hash than most."""
    (_, most), *others = Counter(hashes).most_common()
    if others and others[0][1] == most:
        return "there is no majority to tell which"
    _, odd = sides(hashes)
    some = str(odd) if len(odd) <= _MOST_NAMED else f"{str(odd[:_MOST_NAMED])[:-1]}, ...]"
    return f"against the majority stand ranks {some}"


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def as_bytes(text: str, device: torch.device) -> Tensor:
    """Return a row that has the same length on every rank, so that it can be gathered."""
    coded = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    return torch.tensor(list(coded), dtype=torch.uint8, device=device)


def as_text(row: Tensor) -> str:
    return printable(bytes(row.tolist()).rstrip(b"\0"))


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """Hash values, places and order to 64 bits, wrapping, on the tensors' own device."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten()
        for start in range(0, flat.numel(), _CHUNK):
            bits = _bits(flat[start : start + _CHUNK])
            place = torch.arange(start + 1, start + 1 + bits.numel(), dtype=torch.int64, device=bits.device)
            mixed = (bits ^ (place * _PLACE)) * _MIX
            mixed = (mixed ^ (mixed >> 29)) * _MIX
            mixed ^= mixed >> 32
            total = (total * 31 + int(mixed.sum())) % (1 << 64)
    signed = total - (1 << 64) if total >= 1 << 63 else total
    return torch.tensor([signed], dtype=torch.int64, device="cpu")


def _bits(flat: Tensor) -> Tensor:
    if not flat.is_floating_point():
        return flat.long()
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return flat.view(width).long()
