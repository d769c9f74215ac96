"""A sync's state as tensors, and votes: every rank saves and loads its own, on all ranks or on none.

No rank is changed before all ranks have voted that they can load what they read: it was checked, is of one
step and one run, and holds the parts of all old ranks.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradsieve.checkpoint import fields
from gradsieve.checkpoint.rank_state import (
    Merger,
    RankState,
    flushed,
    has_no_residual,
    is_redundant,
    ranks_to_read,
    restore,
    source_rank,
)
from gradsieve.checkpoint.tree import has_parts, made_like, put_together, taken_apart
from gradsieve.comm.ops import AllGather
from gradsieve.errors import (
    ConfigError,
    GradsieveError,
    Malformed,
    MismatchError,
    RefusedError,
    list_ranks,
    printable,
)
from gradsieve.optimizers import state_made_by
from gradsieve.ranks_alike import against_the_majority, as_bytes, as_text, digest
from gradsieve.replica import Replica
from gradsieve.torch_names import plain_part_of
from gradsieve.types import Program, fields_to_tensors, number_to_tensor, replicated_fields
from gradsieve.units import flat_view, shaped_like

_log = logging.getLogger("gradsieve")

MOST_RANKS = 1 << 20
# An optimizer's settings may be one part in so many of a file, or this long: JSON grows when it is read.
TEXT_SHARE, TEXT_ALWAYS = 64, 1 << 14
FLUSHED = "has_no_residual"  # key in a file without redundant memories
_LONGEST = 1000  # characters of an error that is not ours

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LoadCandidate:
    """Hold what a rank read and checked, for the vote on loading it."""

    world: int  # number of ranks that saved
    part: RankState  # this rank's own, or its source's
    fingerprint: int  # of what has to be the same on all ranks
    merger: Merger | None = None  # if another number of ranks saved


# -- out ------------------------------------------------------------------------------------------------


def state_of(replica: Replica) -> dict[str, Tensor]:
    """Return this rank's state under the same keys in every step: distributed checkpointing asks a fresh sync
    which keys to read."""
    if _is_called_by("accelerate.checkpointing"):
        # It keeps what rank 0 returns and gives it to all ranks: they would find out when they load it.
        raise ConfigError(
            f"{replica.where}: register_for_checkpointing(sync) saves one "
            "rank's state for all of them. Leave it out, and attach by gradsieve.frameworks.accelerate."
            "attach(accelerator, model, optimizer): save_state() then saves every rank's"
        )
    prefix = _shard_prefix(replica)
    return {prefix + key: part.clone() for key, part in _tensors(replica, is_flushed=False).items()}


def _shard_prefix(replica: Replica) -> str:
    """Distributed checkpointing keeps one of equal keys."""
    count = replica.shards_of_host
    return "" if count == 1 else f"shard{replica.shard}-of-{count}/"


def _is_called_by(module: str) -> bool:
    frames = traceback.walk_stack(sys._getframe())
    return any(frame.f_globals.get("__name__") == module for frame, _ in frames)


def shard_of(replica: Replica, optimizers: bool) -> dict[str, Tensor]:
    """Return views of this rank's state without what is redundant, and copies of its optimizers' states."""
    is_flushed, prefix = has_no_residual(replica.pipeline), f"rank{replica.rank}/"
    out = _tensors(replica, is_flushed)
    if is_flushed:
        out[prefix + FLUSHED] = number_to_tensor(1)
    for number, optimizer in enumerate(replica.optimizers if optimizers else ()):
        text, tensors = taken_apart(_identity(replica, optimizer) | replica.optimizer_state(optimizer))
        out[f"{prefix}optimizer/{number}/text"] = fields.text_to_tensor(text)
        out |= {f"{prefix}optimizer/{number}/{place}": tensor for place, tensor in enumerate(tensors)}
    return out


def _identity(replica: Replica, optimizer: Any) -> dict[str, Any]:
    """Moments are stored by number: the same number has to be the same parameter of the same optimizer."""
    names = {id(held): name for name, held in replica.held.items()}
    groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "parameters": groups}


def layout_of(replica: Replica) -> str:
    """Return a hash of the units and of the kinds of memories."""
    units = [[(slot.name, not unit.is_dense) for slot in unit.slots] for unit in replica.pipeline.units]
    kinds = sorted({key.partition("/")[0] for key in replica.pipeline.kept()})
    return hashlib.sha256(repr((units, kinds)).encode()).hexdigest()


def _shaped(replica: Replica) -> dict[str, Tensor]:
    """Return views of the memories, by kind/parameter, in the shapes and strides of the parameters."""
    kept = replica.pipeline.kept().items()
    return {key: shaped_like(view, replica.parameters[key.partition("/")[2]]) for key, view in kept}


def _tensors(replica: Replica, is_flushed: bool) -> dict[str, Tensor]:
    pipeline = replica.pipeline
    out = {
        "format": number_to_tensor(fields.FORMAT),
        "world": number_to_tensor(pipeline.world),
        "step": number_to_tensor(pipeline.step),
        "scheme": fields.text_to_tensor(type(replica.scheme).__name__),
        "layout": fields.text_to_tensor(layout_of(replica)),
    }
    out |= {f"figure/{name}": number_to_tensor(figure) for name, figure in pipeline.figures().items()}
    out |= {key: view for key, view in _shaped(replica).items() if not (is_flushed and is_redundant(key))}
    out |= {f"noted/{index}": vector for index, vector in enumerate(pipeline.samples())}
    mean = pipeline.models.mean
    if not is_flushed or any(bool(vector.any()) for vector in mean):
        out |= {f"common/{index}": vector for index, vector in enumerate(mean)}
    for index, state in enumerate(pipeline.states):
        out |= fields_to_tensors(state, f"unit/{index}/")
    return {f"rank{replica.rank}/{key}": value for key, value in out.items()}


# -- in -------------------------------------------------------------------------------------------------


def candidate_of(replica: Replica, stored: Mapping[str, Tensor]) -> LoadCandidate:
    """Check what `state_of` gave, on this rank or on all the old ranks that this one needs."""
    prefix = _shard_prefix(replica)
    stored = {key.removeprefix(prefix): tensor for key, tensor in stored.items()}
    keys = [key for key in stored if re.fullmatch(r"rank\d{1,7}/world", key)]
    worlds = {int(fields.take(stored, key, (), torch.int64)) for key in keys}
    world = next(iter(worlds), 0)
    if len(worlds) != 1 or not 1 <= world <= MOST_RANKS:
        found = " and ".join(map(str, sorted(worlds))) or "no"
        raise Malformed(
            f"expected the checkpoint of one sync, of 1 to {MOST_RANKS} ranks, not of {found} ranks"
        )
    return gathered(replica, world, lambda rank: part_of(replica, stored, rank, world))


def gathered(replica: Replica, world: int, read: Callable[[int], RankState]) -> LoadCandidate:
    """Read the parts of old ranks that this rank needs, one after the other."""
    own, source = None, source_rank(replica.rank, world)
    merger = None if world == replica.world else Merger(replica.pipeline, world)
    seen: set[tuple[int, int]] = set()
    for rank in ranks_to_read(replica.rank, replica.world, world):
        part = read(rank)
        seen.add((part.step, _fingerprint(part)))
        if len(seen) > 1:
            raise Malformed(f"the part of rank {rank} is of another run or step than those before it")
        if merger is not None:
            merger.add(rank, part)
        if rank == source:
            own = part
    assert own is not None
    ((_, fingerprint),) = seen
    return LoadCandidate(world, own, fingerprint, merger)


def part_of(
    replica: Replica, stored: Mapping[str, Tensor], rank: int, world: int, with_optimizers: bool = False
) -> RankState:
    """Check the part of old rank `rank`."""
    pipeline, prefix = replica.pipeline, f"rank{rank}/"
    if world != pipeline.world and prefix + "format" not in stored:
        needed = list_ranks(ranks_to_read(replica.rank, replica.world, world))
        raise Malformed(
            f"{world} ranks saved this checkpoint and {pipeline.world} load it: rank {replica.rank} then "
            f"needs what {needed} had, and is not given that of rank {rank} "
            "(dcp.load reads no parts of ranks that are no more). Save with sync.save(folder) and load with "
            "sync.load(folder), or give load_state_dict() all of these parts: docs/checkpoints.md"
        )
    step, figures = head_of(replica, stored, rank, world)
    if fields.take_text(stored, prefix + "layout") != layout_of(replica):
        raise Malformed("the checkpoint is of a model cut into other units: load it with the same exchange")
    states = [
        fields.fields_from_tensors(state, stored, f"{prefix}unit/{index}/")
        for index, state in enumerate(pipeline.init_states(world))
    ]
    if any(getattr(state, "n", unit.n) != unit.n for state, unit in zip(states, pipeline.units, strict=True)):
        raise Malformed("a scheme's state in the checkpoint is for another number of elements")
    samples = fields.take_all(stored, prefix + "noted/", pipeline.samples())
    has_mean = f"{prefix}common/0" in stored
    mean = fields.take_all(stored, prefix + "common/", pipeline.models.mean if has_mean else [])
    like = _shaped(replica)
    memories = {key: _flat(found, like[key]) for key, found in memories_in(stored, rank, like).items()}
    optimizers = optimizers_of(replica, stored, rank) if with_optimizers else ()
    return RankState(step, figures, memories, states, samples, mean, optimizers)


def head_of(
    replica: Replica, stored: Mapping[str, Tensor], rank: int, world: int
) -> tuple[int, dict[str, float]]:
    """Return step and figures of old rank `rank`, if they are of this kind of run."""
    prefix = f"rank{rank}/"
    for key, expected in (("format", fields.FORMAT), ("world", world)):
        found = int(fields.take(stored, prefix + key, (), torch.int64))
        if found != expected:
            raise Malformed(f"the checkpoint's {key} is {found}, not {expected}")
    scheme, saved_by = type(replica.scheme).__name__, fields.take_text(stored, prefix + "scheme")
    if saved_by != scheme:
        raise Malformed(f"the checkpoint is of scheme {saved_by}, this run's is {scheme}")
    step = int(fields.take(stored, prefix + "step", (), torch.int64))
    figures = {
        name: float(fields.take(stored, f"{prefix}figure/{name}", (), torch.float64))
        for name in replica.pipeline.figures()
    }
    if step < 0 or not all(map(math.isfinite, figures.values())):
        raise Malformed(
            f"the checkpoint is corrupted or forged: expected a step of at least 0 and finite figures, found "
            f"step {step} and {figures}"
        )
    return step, figures


def memories_in(stored: Mapping[str, Tensor], rank: int, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the memories of old rank `rank` in shapes and types of `like`, by kind/parameter."""
    is_flushed = f"rank{rank}/{FLUSHED}" in stored
    out = {
        key: fields.take(stored, f"rank{rank}/{key}", tuple(tensor.shape), tensor.dtype)
        for key, tensor in like.items()
        if not (is_flushed and is_redundant(key))
    }
    return out | {key: flushed(key, out, like) for key in like if key not in out}


def _flat(found: Tensor, like: Tensor) -> Tensor:
    """Return the elements in the order in which those of `like` lie in memory."""
    if like.is_contiguous():
        return found.reshape(-1)
    return flat_view(torch.empty_like(like, device=found.device).copy_(found))


def optimizers_of(replica: Replica, stored: Mapping[str, Tensor], rank: int) -> list[Any]:
    size = sum(tensor.nbytes for tensor in stored.values())
    out, optimizers = [], replica.optimizers
    prefix = f"rank{rank}/optimizer/"
    if any(key.startswith(f"{prefix}{len(optimizers)}/") for key in stored):
        raise Malformed(f"the checkpoint has more than the {len(optimizers)} optimizers of this run")
    for number, optimizer in enumerate(optimizers):
        here = f"{prefix}{number}/"
        text = fields.take_text(stored, here + "text", max(TEXT_ALWAYS, size // TEXT_SHARE))
        count = sum(key.startswith(here) for key in stored) - 1
        tensors = [stored[f"{here}{place}"].clone() for place in range(count) if f"{here}{place}" in stored]
        tree = put_together(text, tensors)
        identity = _identity(replica, optimizer)
        if not isinstance(tree, dict) or {key: tree.pop(key, None) for key in identity} != identity:
            raise Malformed(
                f"optimizer {number} in the checkpoint is no {identity['class']}, or has other parameters or "
                "groups, or another order of them: make it as it was, or load(folder, optimizers=False)"
            )
        out.append(_whole(tree, optimizer))
    return out


def _whole(tree: Any, optimizer: Any) -> Any:
    """Give moments the classes and the order in memory that this optimizer would make them in."""
    states = tree.get("state")
    if not isinstance(states, dict):
        raise Malformed("an optimizer in the checkpoint has no state")
    every = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    made = {}
    for place, state in states.items():
        is_there = type(place) is int and 0 <= place < len(every)
        like = state_made_by(optimizer, place) if is_there and has_parts(state) else None
        made[place] = made_like(state, like)
        if is_there and isinstance(state, dict):
            _lay_out(made[place], plain_part_of(every[place]))
    return made_like({**tree, "state": made}, None)


def _lay_out(state: dict[str, Any], parameter: Tensor) -> None:
    for key, moment in state.items():
        if type(moment) is Tensor and moment.shape == parameter.shape:  # a file has the order of indices
            like = torch.empty_like(parameter, dtype=moment.dtype, device=moment.device)
            state[key] = like.copy_(moment)


# -- on all ranks or none -------------------------------------------------------------------------------


def attempt(call: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Return what `call` returns, or its error: the other ranks wait for this rank's vote."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def vote(replica: Replica, outcome: str, what: str, row: Sequence[int], problem: Exception | None) -> Tensor:
    """Return the rows of all shards of all ranks; raise on all of them if one has a problem."""
    mine = torch.tensor([int(problem is None), *row], dtype=torch.int64, device=replica.device)
    when = f"the vote on {what} after step {replica.pipeline.step}"
    program = _vote_among_ranks(replica, outcome, mine, problem)
    rows, refusal = attempt(lambda: replica.engine.run(program, when, replica.device))
    if replica.shards_of_host > 1:
        reason = as_bytes("" if refusal is None else f"-{_reason(refusal)}", replica.device)
        for shard, text in enumerate(map(as_text, replica.of_all_shards(reason))):
            if text and refusal is None:
                raise RefusedError(f"{replica.where}: {outcome}: shard {shard} refused: {text[1:]}")
    if refusal is not None:
        raise refusal
    assert rows is not None
    return replica.of_all_shards(rows.flatten()).view(-1, *rows.shape)


def _vote_among_ranks(
    replica: Replica, outcome: str, mine: Tensor, problem: Exception | None
) -> Program[Tensor]:
    rows = yield AllGather(mine)
    refused = (rows[:, 0] != 1).nonzero().flatten().tolist()
    if not refused:
        return rows[:, 1:]
    texts = yield AllGather(as_bytes("" if problem is None else _reason(problem), replica.device))
    begin = f"{replica.where}: {outcome}"
    if problem is not None:
        others = "" if len(refused) == 1 else f" ({list_ranks(refused)} refused)"
        raise RefusedError(f"{begin}{others}: {_reason(problem)}") from problem
    some = [f"rank {number} refused: {as_text(texts[number])}" for number in refused[:4]]
    more = "" if len(refused) <= 4 else f"; and {len(refused) - 4} other ranks"
    raise RefusedError(f"{begin}: {'; '.join(some)}{more}")


def _reason(problem: Exception) -> str:
    if isinstance(problem, GradsieveError):
        return str(problem)
    return f"{type(problem).__name__}: {printable(str(problem))[:_LONGEST]}"  # it may quote what a file says


def load(replica: Replica, read: Callable[[], LoadCandidate]) -> None:
    """Load what `read` returns, on all ranks or on none. No exchange is pending."""
    undo: list[tuple[Any, Any]] = []

    def prepared() -> LoadCandidate:
        candidate = read()
        for optimizer, state in zip(replica.optimizers, candidate.part.optimizers, strict=False):
            undo.append((optimizer, replica.optimizer_state(optimizer)))
            replica.set_optimizer_state(optimizer, state)
        return candidate

    try:
        candidate, problem = attempt(prepared)
        row = [0, 0, 0]
        if candidate is not None:
            row = [candidate.part.step, candidate.world, candidate.fingerprint]
        _check_alike(replica, vote(replica, "nothing was loaded on any rank", "loading", row, problem))
        assert candidate is not None
        part = candidate.part
        if candidate.merger is not None:
            merged = candidate.merger.merged(part)
            part = replica.engine.run(merged, "the residuals of all ranks", replica.device)
    except BaseException:
        for optimizer, state in undo:
            replica.set_optimizer_state(optimizer, state)
        raise
    replica.engine.call(lambda: restore(replica.pipeline, part), replica.device).result()
    replica.compared = part.step
    replica.models.point_again()
    if candidate.world != replica.world and replica.rank == 0:
        _warn_of_resizing(replica, candidate)


def _check_alike(replica: Replica, rows: Tensor) -> None:
    """Raise unless all ranks of each shard agree, and all shards on the first two columns."""
    kinds = "of different steps", "of different numbers of ranks", "that hold different shared models"
    for group in (rows[:, 0, :2], *rows):
        for what, values in zip(kinds, group.t().tolist(), strict=False):
            if len(set(values)) > 1:
                steps = ", ".join(
                    f"rank {rank} step {step}" for rank, step in enumerate(group[:8, 0].tolist())
                )
                raise MismatchError(
                    f"rank {replica.rank}: ranks loaded checkpoints {what} ({steps}); nothing was loaded; "
                    f"{against_the_majority(values)}. Give all ranks the checkpoint of one step of one run"
                )


def _fingerprint(part: RankState) -> int:
    shared = [tensor for key, tensor in part.memories.items() if key.startswith("shared/")]
    figures = torch.tensor(list(part.figures.values()), dtype=torch.float64, device="cpu")
    of_schemes = []
    for state in part.states:
        tensors = fields_to_tensors(state)
        of_schemes += [tensors[name] for name in replicated_fields(state)]
    return int(digest([figures, *of_schemes, *shared]))


def _warn_of_resizing(replica: Replica, candidate: LoadCandidate) -> None:
    old = candidate.world
    optimizers = f"; rank r took the optimizer of old rank r mod {old}" if candidate.part.optimizers else ""
    _log.warning(
        "step %d: a checkpoint of %d ranks was loaded on %d. Residuals are kept: each of the new ranks "
        "has the mean of the old ones. Partitions were initialised again, thresholds were kept where the "
        "scheme has them for the whole model%s. A rank's data and batch are yours to set for the new number",
        *(replica.pipeline.step, old, replica.world, optimizers),
    )
