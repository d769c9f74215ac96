"""A sync's state, out and in: every rank its own, all ranks or none.

Nothing is changed on any rank before all of them have said that they can: what they read was checked, is of
one step and one run, and holds every old rank's part.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gradsieve.checkpoint import fields
from gradsieve.checkpoint.rank_state import (
    Merger,
    RankState,
    filled_in,
    has_no_residual,
    left_out,
    needed_by,
    restore,
    stand_in,
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
from gradsieve.feedback.units import flat_view, shaped_like
from gradsieve.optimizers import state_made_by
from gradsieve.ranks_alike import against_the_majority, as_bytes, as_text, digest
from gradsieve.replica.replica import Replica
from gradsieve.torch_names import plain_part_of
from gradsieve.types import Program, fields_to_tensors, number_to_tensor, replicated_fields

_log = logging.getLogger("gradsieve")

MOST_RANKS = 1 << 20
# An optimizer's settings may be one part in so many of a file, or this long: JSON grows when it is read.
TEXT_SHARE, TEXT_ALWAYS = 64, 1 << 14
BARE = "has_no_residual"
_LONGEST = 1000  # characters of somebody else's error


@dataclass(frozen=True, slots=True)
class LoadCandidate:
    """What a rank read, checked."""

    world: int  # of the run that saved
    part: RankState  # this rank's own, or the one that stands in for it
    fingerprint: int  # of what has to be the same on all ranks
    merger: Merger | None = None  # where as many ranks as now did not save
    optimizers: list[Any] | None = None  # their states, if they are to be loaded


# -- out ------------------------------------------------------------------------------------------------


def state_of(replica: Replica) -> dict[str, Tensor]:
    """Always under the same keys: distributed checkpointing asks a fresh sync which to read."""
    if _is_called_by("accelerate.checkpointing"):
        # It keeps what rank 0 returns and gives it to all ranks: they would find out when they load it.
        raise ConfigError(
            f"{replica.where}: register_for_checkpointing(sync) saves one "
            "rank's state for all of them. Leave it out, and attach by gradsieve.frameworks.accelerate."
            "attach(accelerator, model, optimizer): save_state() then saves every rank's"
        )
    return {key: part.clone() for key, part in _tensors(replica, frozenset()).items()}


def _is_called_by(module: str) -> bool:
    """However many functions lie in between: each kind of sync has its own `state_dict`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


def shard_of(replica: Replica, optimizers: bool) -> dict[str, Tensor]:
    """As it lies in memory, without what follows from the rest; with the optimizers' states."""
    bare, prefix = has_no_residual(replica.pipeline), f"rank{replica.rank}/"
    out = _tensors(replica, left_out(replica.pipeline) if bare else frozenset())
    if bare:
        out[prefix + BARE] = number_to_tensor(1)
    for number, optimizer in enumerate(replica.optimizers if optimizers else ()):
        text, tensors = taken_apart(_kind_of(replica, optimizer) | replica.optimizer_state(optimizer))
        out[f"{prefix}optimizer/{number}/text"] = fields.text_to_tensor(text)
        out |= {f"{prefix}optimizer/{number}/{place}": tensor for place, tensor in enumerate(tensors)}
    return out


def _kind_of(replica: Replica, optimizer: Any) -> dict[str, Any]:
    """Moments are stored by number: the same number has to be the same parameter of the same optimizer."""
    names = {id(held): name for name, held in replica.held.items()}
    groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "parameters": groups}


def layout_of(replica: Replica) -> str:
    """A hash of units, and of what is kept."""
    units = [[(slot.name, slot.sparse) for slot in unit.slots] for unit in replica.pipeline.units]
    kinds = sorted({key.partition("/")[0] for key in replica.pipeline.kept()})
    return hashlib.sha256(repr((units, kinds)).encode()).hexdigest()


def _tensors(replica: Replica, without: frozenset[str]) -> dict[str, Tensor]:
    pipeline = replica.pipeline
    out = {
        "format": number_to_tensor(fields.FORMAT),
        "world": number_to_tensor(pipeline.world),
        "step": number_to_tensor(pipeline.step),
        "scheme": fields.text_to_tensor(type(replica.scheme).__name__),
        "layout": fields.text_to_tensor(layout_of(replica)),
    }
    out |= {f"figure/{name}": number_to_tensor(figure) for name, figure in pipeline.figures().items()}
    for key, part in pipeline.kept().items():
        kind, _, name = key.partition("/")
        if kind not in without:
            out[key] = shaped_like(part, replica.parameters[name])
    out |= {f"noted/{index}": vector for index, vector in enumerate(pipeline.noted())}
    if not without or any(bool(vector.any()) for vector in pipeline.common()):
        out |= {f"common/{index}": vector for index, vector in enumerate(pipeline.common())}
    for index, state in enumerate(pipeline.states):
        out |= fields_to_tensors(state, f"unit/{index}/")
    return {f"rank{replica.rank}/{key}": value for key, value in out.items()}


# -- in -------------------------------------------------------------------------------------------------


def offer_of(replica: Replica, stored: Mapping[str, Tensor]) -> LoadCandidate:
    """Of what `state_dict` gave, on this rank or on as many as this one needs."""
    keys = [key for key in stored if re.fullmatch(r"rank\d{1,7}/world", key)]
    worlds = {int(fields.take(stored, key, (), torch.int64)) for key in keys}
    if len(worlds) != 1:
        said = " and ".join(map(str, sorted(worlds))) or "no"
        raise Malformed(f"this is not a checkpoint of one sync: it is of {said} ranks")
    world = worlds.pop()
    if not 1 <= world <= MOST_RANKS:
        raise Malformed(f"the checkpoint says that {world} ranks saved it")
    return gathered(replica, world, lambda rank: part_of(replica, stored, rank, world))


def gathered(replica: Replica, world: int, read: Callable[[int], RankState]) -> LoadCandidate:
    """What this rank needs of a run of `world` ranks; parts are read one after the other."""
    rank, own = replica.rank, None
    merger = None if world == replica.world else Merger(replica.pipeline, world)
    seen: set[tuple[int, int]] = set()
    for each in parts_for(replica, world):
        part = read(each)
        seen.add((part.step, _fingerprint(part)))
        if len(seen) > 1:
            raise Malformed(f"the part of rank {each} is of another run or step than those before it")
        if merger is not None:
            merger.add(each, part)
        if each == stand_in(rank, world):
            own = part
    assert own is not None
    ((_, fingerprint),) = seen
    return LoadCandidate(world, own, fingerprint, merger)


def parts_for(replica: Replica, world: int) -> list[int]:
    """Which old ranks' parts this one has to read."""
    return needed_by(replica.rank, replica.world, world)


def part_of(replica: Replica, stored: Mapping[str, Tensor], rank: int, world: int) -> RankState:
    """What old rank `rank` had, checked."""
    pipeline, prefix = replica.pipeline, f"rank{rank}/"
    if world != pipeline.world and prefix + "format" not in stored:
        raise Malformed(
            f"{world} ranks saved this checkpoint and {pipeline.world} load it: rank {replica.rank} then "
            f"needs what {list_ranks(parts_for(replica, world))} had, and is not given that of rank {rank} "
            "(dcp.load reads no parts of ranks that are no more). Save with sync.save(folder) and load with "
            "sync.load(folder), or give load_state_dict() all of these parts: docs/checkpoints.md"
        )
    step, figures = head_of(replica, stored, rank, world)
    if fields.take_text(stored, prefix + "layout") != layout_of(replica):
        raise Malformed("the checkpoint is of a model cut into other units: load it with the same exchange")
    states = [
        fields.fields_from_tensors(
            replica.scheme.init_state(unit.sizes, world), stored, f"{prefix}unit/{index}/"
        )
        for index, unit in enumerate(pipeline.units)
    ]
    if any(getattr(state, "n", unit.n) != unit.n for state, unit in zip(states, pipeline.units, strict=True)):
        raise Malformed("a scheme's state in the checkpoint is for another number of elements")
    common = pipeline.common() if f"{prefix}common/0" in stored else []
    vectors = [
        [
            fields.take(stored, f"{prefix}{kind}/{index}", tuple(like.shape), like.dtype)
            for index, like in enumerate(every)
        ]
        for kind, every in (("noted", pipeline.noted()), ("common", common))
    ]
    return RankState(step, figures, _memories(replica, stored, prefix), states, *vectors)


def head_of(
    replica: Replica, stored: Mapping[str, Tensor], rank: int, world: int
) -> tuple[int, dict[str, float]]:
    """Step and figures of old rank `rank`, if what is stored is of this kind of run."""
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
        raise Malformed(f"step {step} and figures {figures} in the checkpoint cannot be")
    return step, figures


def _memories(replica: Replica, stored: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    bare = prefix + BARE in stored
    without = left_out(replica.pipeline) if bare else frozenset()
    out = {}
    for key, view in replica.pipeline.kept().items():
        kind, _, name = key.partition("/")
        if kind not in without:
            parameter = replica.parameters[name]
            found = fields.take(stored, prefix + key, tuple(parameter.shape), view.dtype)
            out[key] = _flat(found, parameter)
    return filled_in(replica.pipeline, out) if bare else out


def _flat(found: Tensor, parameter: Tensor) -> Tensor:
    """In the order in which the parameter's elements lie in memory."""
    if parameter.is_contiguous():
        return found.reshape(-1)
    return flat_view(torch.empty_like(parameter, dtype=found.dtype, device=found.device).copy_(found))


def optimizers_of(replica: Replica, stored: Mapping[str, Tensor], rank: int, size: int) -> list[Any]:
    """The states of old rank `rank`'s optimizers, in a file of `size` bytes."""
    out, optimizers = [], replica.optimizers
    prefix = f"rank{rank}/optimizer/"
    if any(key.startswith(f"{prefix}{len(optimizers)}/") for key in stored):
        raise Malformed(f"the checkpoint has more than the {len(optimizers)} optimizers of this run")
    for number, optimizer in enumerate(optimizers):
        here = f"{prefix}{number}/"
        text = fields.take(stored, here + "text", None, torch.uint8)
        if text.dim() != 1 or text.numel() > max(TEXT_ALWAYS, size // TEXT_SHARE):
            raise Malformed(f"{here + 'text'!r} in the checkpoint, of shape {tuple(text.shape)}, is too long")
        count = sum(key.startswith(here) for key in stored) - 1
        tensors = [stored[f"{here}{place}"].clone() for place in range(count) if f"{here}{place}" in stored]
        tree = put_together(fields.tensor_to_text(text), tensors)
        kind = _kind_of(replica, optimizer)
        if not isinstance(tree, dict) or {key: tree.pop(key, None) for key in kind} != kind:
            raise Malformed(
                f"optimizer {number} in the checkpoint is no {kind['class']}, or has other parameters or "
                "groups, or another order of them: make it as it was, or load(folder, optimizers=False)"
            )
        out.append(_laid_out(_whole(tree, optimizer), optimizer))
    return out


def _laid_out(tree: Any, optimizer: Any) -> Any:
    """With moments that lie in memory as their parameters do, as the optimizer makes them: a file has all in
    the order of their indices."""
    every = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    for place, state in tree["state"].items():
        if type(place) is not int or not 0 <= place < len(every) or not isinstance(state, dict):
            continue
        like = plain_part_of(every[place])
        for key, moment in state.items():
            if type(moment) is Tensor and moment.shape == like.shape and moment.stride() != like.stride():
                state[key] = torch.empty_like(like, dtype=moment.dtype, device=moment.device).copy_(moment)
    return tree


def _whole(tree: Any, optimizer: Any) -> Any:
    """With moments of the classes that this optimizer makes itself."""
    states = tree.get("state")
    if not isinstance(states, dict):
        raise Malformed("an optimizer in the checkpoint has no state")
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    made = {}
    for place, state in states.items():
        is_there = type(place) is int and 0 <= place < count
        like = state_made_by(optimizer, place) if is_there and has_parts(state) else None
        made[place] = made_like(state, like)
    return made_like({**tree, "state": made}, None)


# -- on all ranks or none -------------------------------------------------------------------------------


def on_all_shards(replica: Replica, outcome: str, call: Callable[[], Tensor]) -> Tensor:
    """What `call` returns on every shard of this host; raises on all of them where it does on one."""
    if replica.shards_of_host == 1:
        return call().unsqueeze(0)
    mine, problem = None, None
    try:
        mine = call()
    except Exception as error:  # whatever it is, the other shards wait for the outcome
        problem = error
    texts = replica.of_all_shards(as_bytes("" if problem is None else f"-{_reason(problem)}", replica.device))
    if isinstance(problem, GradsieveError):
        raise problem
    if problem is not None:
        raise RefusedError(f"{replica.where}: {outcome}: {_reason(problem)}") from problem
    for shard, said in enumerate(map(as_text, texts)):
        if said:
            raise RefusedError(f"{replica.where}: {outcome}: shard {shard} refused: {said[1:]}")
    assert mine is not None
    return replica.of_all_shards(mine.flatten()).view(-1, *mine.shape)


def load(replica: Replica, read: Callable[[], LoadCandidate]) -> None:
    """Load what `read` offers, on all ranks or on none. No exchange is pending."""
    offer, problem = None, None
    undo: list[tuple[Any, Any]] = []

    def step_read() -> Tensor:
        nonlocal offer
        offer = read()
        return torch.tensor([offer.part.step], dtype=torch.int64, device=replica.device)

    try:
        try:
            steps = on_all_shards(replica, "nothing was loaded", step_read).flatten().tolist()
            if len({*steps}) > 1:
                raise Malformed(f"shards of this host are of different steps: {steps}")
            assert offer is not None
            for optimizer, state in zip(replica.optimizers, offer.optimizers or (), strict=False):
                undo.append((optimizer, replica.optimizer_state(optimizer)))
                replica.set_optimizer_state(optimizer, state)
        except Exception as error:  # whatever it is, the other ranks wait for the outcome
            problem = error
        when = f"after step {replica.pipeline.step}"
        replica.engine.run(_vote(replica, offer, problem), f"the vote on loading {when}", replica.device)
        assert offer is not None
        part = offer.part
        if offer.merger is not None:
            part = replica.engine.run(offer.merger.merged(), "the residuals of all ranks", replica.device)
    except BaseException:
        for optimizer, state in undo:
            replica.set_optimizer_state(optimizer, state)
        raise
    replica.engine.call(lambda: restore(replica.pipeline, part), replica.device).result()
    replica.compared = part.step
    replica.views.renew()
    if offer.world != replica.world and replica.rank == 0:
        _say_resized(replica, offer)


def _vote(replica: Replica, offer: LoadCandidate | None, problem: Exception | None) -> Program[None]:
    rank, device = replica.rank, replica.device
    mine = [0, 0, 0, 0]
    if offer is not None and problem is None:
        mine = [1, offer.part.step, offer.fingerprint, offer.world]
    rows = (yield AllGather(torch.tensor(mine, dtype=torch.int64, device=device))).tolist()
    refused = [number for number, row in enumerate(rows) if row[0] != 1]
    if refused:
        yield from refuse(replica, "nothing was loaded on any rank", refused, problem)
    kinds = "of different steps", "that hold different shared models", "of different numbers of ranks"
    for column, what in enumerate(kinds, 1):
        values = [row[column] for row in rows]
        if len(set(values)) > 1:
            steps = ", ".join(f"rank {number} step {row[1]}" for number, row in enumerate(rows[:8]))
            raise MismatchError(
                f"rank {rank}: ranks loaded checkpoints {what} ({steps}); nothing was loaded; "
                f"{against_the_majority(values)}. Give all ranks the checkpoint of one step of one run"
            )


def refuse(replica: Replica, outcome: str, refused: list[int], problem: Exception | None) -> Program[None]:
    """Raise on all ranks who could not do it, and why."""
    texts = yield AllGather(as_bytes("" if problem is None else _reason(problem), replica.device))
    some = [f"rank {number} refused: {as_text(texts[number])}" for number in refused[:4]]
    more = "" if len(refused) <= 4 else f"; and {len(refused) - 4} other ranks"
    begin = f"{replica.where}: {outcome}"
    if problem is not None:
        others = "" if len(refused) == 1 else f" ({list_ranks(refused)} refused)"
        raise RefusedError(f"{begin}{others}: {_reason(problem)}") from problem
    raise RefusedError(f"{begin}: {'; '.join(some)}{more}")


def _reason(problem: Exception) -> str:
    if isinstance(problem, GradsieveError):
        return str(problem)
    return f"{type(problem).__name__}: {printable(str(problem))[:_LONGEST]}"  # it may quote what a file says


def _fingerprint(part: RankState) -> int:
    shared = [each for key, each in part.memories.items() if key.startswith("shared/")]
    figures = torch.tensor(list(part.figures.values()), dtype=torch.float64, device="cpu")
    fields = []
    for state in part.states:
        tensors = fields_to_tensors(state)
        fields += [tensors[name] for name in replicated_fields(state)]
    return int(digest([figures, *fields, *shared]))


def _say_resized(replica: Replica, offer: LoadCandidate) -> None:
    optimizers = f"; rank r took the optimizer of old rank r mod {offer.world}" if offer.optimizers else ""
    _log.warning(
        "step %d: a checkpoint of %d ranks was loaded on %d. Residuals are kept: each of the new ranks "
        "has the mean of the old ones. Partitions were initialised again, thresholds were kept where the "
        "scheme has them for the whole model%s. A rank's data and batch are yours to set for the new number",
        *(replica.pipeline.step, offer.world, replica.world, optimizers),
    )
