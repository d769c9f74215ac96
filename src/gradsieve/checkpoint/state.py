"""A sync's state, out and in: every rank its own, all ranks or none.

Nothing is changed on any rank before all of them have said that they can: what they read was checked, is of
one step and one run, and holds every old rank's part.
"""

from __future__ import annotations

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

from gradsieve.comm.ops import AllGather
from gradsieve.consensus.handshake import against_the_majority, as_bytes, as_text
from gradsieve.errors import ConfigError, GradsieveError, Malformed, MismatchError, RefusedError, list_ranks
from gradsieve.feedback import checkpoint
from gradsieve.feedback.digest import digest
from gradsieve.feedback.step_length import state_made_by
from gradsieve.feedback.tree import has_parts, made_like, put_together, taken_apart
from gradsieve.feedback.units import flat_view, shaped_like
from gradsieve.pipeline.parts import (
    Merger,
    RankState,
    filled_in,
    has_no_residual,
    left_out,
    needed_by,
    restore,
    stand_in,
)
from gradsieve.replica.replica import Replica
from gradsieve.torch_names import plain_part_of
from gradsieve.types import Program, replicated_fields

_log = logging.getLogger("gradsieve")

MOST_RANKS = 1 << 20
TEXT_SHARE, TEXT_ALWAYS = 64, 1 << 14
"""An optimizer's settings may be one part in so many of a file, or this long: JSON grows when it is read."""
BARE = "has_no_residual"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank read, checked."""

    world: int
    """Of the run that saved."""
    part: RankState
    """This rank's own, or the one that stands in for it."""
    fingerprint: int
    """Of what has to be the same on all ranks."""
    merger: Merger | None = None
    """Where as many ranks as now did not save."""
    optimizers: list[Any] | None = None
    """Their states, if they are to be loaded."""


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
        out[prefix + BARE] = checkpoint.number_to_tensor(1)
    for number, one in enumerate(replica.optimizers if optimizers else ()):
        text, tensors = taken_apart(replica.optimizer_state(one))
        out[f"{prefix}optimizer/{number}/text"] = checkpoint.text_to_tensor(text)
        out |= {f"{prefix}optimizer/{number}/{place}": each for place, each in enumerate(tensors)}
    return out


def _tensors(replica: Replica, without: frozenset[str]) -> dict[str, Tensor]:
    pipeline = replica.pipeline
    out = {
        "format": checkpoint.number_to_tensor(checkpoint.FORMAT),
        "world": checkpoint.number_to_tensor(pipeline.world),
        "step": checkpoint.number_to_tensor(pipeline.step),
        "scheme": checkpoint.text_to_tensor(type(replica.scheme).__name__),
    }
    for name, figure in pipeline.figures().items():
        out[f"figure/{name}"] = checkpoint.number_to_tensor(figure)
    for key, part in pipeline.kept().items():
        kind, _, name = key.partition("/")
        if kind not in without:
            out[key] = shaped_like(part, replica.parameters[name])
    out |= {f"noted/{index}": vector for index, vector in enumerate(pipeline.noted())}
    if not without or any(bool(vector.any()) for vector in pipeline.common()):
        out |= {f"common/{index}": vector for index, vector in enumerate(pipeline.common())}
    for index, state in enumerate(pipeline.states):
        out.update(checkpoint.fields_to_tensors(state, f"unit/{index}/"))
    return {f"rank{replica.rank}/{key}": value for key, value in out.items()}


# -- in -------------------------------------------------------------------------------------------------


def offer_of(replica: Replica, stored: Mapping[str, Tensor]) -> Offer:
    """Of what `state_dict` gave, on this rank or on as many as this one needs."""
    keys = [key for key in stored if re.fullmatch(r"rank\d{1,7}/world", key)]
    worlds = {int(checkpoint.take(stored, key, (), torch.int64)) for key in keys}
    if len(worlds) != 1:
        said = " and ".join(map(str, sorted(worlds))) or "no"
        raise Malformed(f"this is not a checkpoint of one sync: it is of {said} ranks")
    world = checked_world(worlds.pop())
    return gathered(replica, world, lambda rank: part_of(replica, stored, rank, world))


def gathered(replica: Replica, world: int, read: Callable[[int], RankState]) -> Offer:
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
    return Offer(world, own, fingerprint, merger)


def checked_world(world: int) -> int:
    if not 1 <= world <= MOST_RANKS:
        raise Malformed(f"the checkpoint says that {world} ranks saved it")
    return world


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
    states = [
        checkpoint.fields_from_tensors(
            replica.scheme.init_state(unit.sizes, world), stored, f"{prefix}unit/{index}/"
        )
        for index, unit in enumerate(pipeline.units)
    ]
    if any(getattr(state, "n", unit.n) != unit.n for state, unit in zip(states, pipeline.units, strict=True)):
        raise Malformed("a scheme's state in the checkpoint is for another number of elements")
    noted = [
        checkpoint.take(stored, f"{prefix}noted/{index}", tuple(like.shape), like.dtype)
        for index, like in enumerate(pipeline.noted())
    ]
    common = [
        checkpoint.take(stored, f"{prefix}common/{index}", tuple(like.shape), like.dtype)
        for index, like in enumerate(pipeline.common() if f"{prefix}common/0" in stored else ())
    ]
    return RankState(step, figures, _memories(replica, stored, prefix), states, noted, common)


def head_of(
    replica: Replica, stored: Mapping[str, Tensor], rank: int, world: int
) -> tuple[int, dict[str, float]]:
    """Step and figures of old rank `rank`, if what is stored is of this kind of run."""
    prefix = f"rank{rank}/"
    for key, expected in (("format", checkpoint.FORMAT), ("world", world)):
        found = int(checkpoint.take(stored, prefix + key, (), torch.int64))
        if found != expected:
            raise Malformed(f"the checkpoint's {key} is {found}, not {expected}")
    scheme = type(replica.scheme).__name__
    saved_by = checkpoint.tensor_to_text(checkpoint.take(stored, prefix + "scheme", None, torch.uint8))
    if saved_by != scheme:
        raise Malformed(f"the checkpoint is of scheme {saved_by}, this run's is {scheme}")
    step = int(checkpoint.take(stored, prefix + "step", (), torch.int64))
    figures = {name: checkpoint.take_figure(stored, prefix, name) for name in replica.pipeline.figures()}
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
            found = checkpoint.take(stored, prefix + key, tuple(parameter.shape), view.dtype)
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
    for number in range(len(optimizers)):
        here = f"{prefix}{number}/"
        text = checkpoint.take(stored, here + "text", None, torch.uint8)
        if text.dim() != 1 or text.numel() > max(TEXT_ALWAYS, size // TEXT_SHARE):
            raise Malformed(f"{here + 'text'!r} in the checkpoint, of shape {tuple(text.shape)}, is too long")
        count = sum(key.startswith(here) for key in stored) - 1
        tensors = [stored[f"{here}{place}"].clone() for place in range(count) if f"{here}{place}" in stored]
        tree = _whole(put_together(checkpoint.tensor_to_text(text), tensors), optimizers[number])
        out.append(_laid_out(tree, optimizers[number]))
    return out


def _laid_out(tree: Any, optimizer: Any) -> Any:
    """With moments that lie in memory as their parameters do, as the optimizer makes them: a file has all in
    the order of their indices."""
    states = tree.get("state") if isinstance(tree, dict) else None
    if not isinstance(states, dict):
        return tree
    every = [each.detach() for group in optimizer.param_groups for each in group["params"]]
    for place, state in states.items():
        if type(place) is int and 0 <= place < len(every) and isinstance(state, dict):
            like = plain_part_of(every[place])
            for key, moment in state.items():
                if type(moment) is not Tensor or moment.shape != like.shape:
                    continue
                if moment.stride() != like.stride():
                    state[key] = torch.empty_like(like, dtype=moment.dtype, device=moment.device).copy_(
                        moment
                    )
    return tree


def _whole(tree: Any, optimizer: Any) -> Any:
    """With moments of the classes that this optimizer makes itself."""
    states = tree.get("state") if isinstance(tree, dict) else None
    if not isinstance(states, dict) or not has_parts(states):
        return made_like(tree, None)
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    made = {}
    for place, state in states.items():
        if has_parts(state) and not (type(place) is int and 0 <= place < count):
            raise Malformed(f"the checkpoint has the state of parameter {place!r}, and there are {count}")
        made[place] = made_like(state, state_made_by(optimizer, place)) if has_parts(state) else state
    return made_like({**tree, "state": made}, None)


def load(replica: Replica, read: Callable[[], Offer]) -> None:
    """Load what `read` offers, on all ranks or on none. No exchange is pending."""
    offer, problem = None, None
    undo: list[tuple[Any, Any]] = []
    try:
        try:
            offer = read()
            for one, state in zip(replica.optimizers, offer.optimizers or (), strict=False):
                undo.append((one, replica.optimizer_state(one)))
                replica.set_optimizer_state(one, state)
        except Exception as error:  # whatever it is, the other ranks wait for the outcome
            problem = error
        when = f"after step {replica.pipeline.step}"
        replica.engine.run(_vote(replica, offer, problem), f"the vote on loading {when}", replica.device)
        assert offer is not None
        part = offer.part
        if offer.merger is not None:
            part = replica.engine.run(offer.merger.merged(), "the residuals of all ranks", replica.device)
    except BaseException:
        for one, state in undo:
            replica.set_optimizer_state(one, state)
        raise
    replica.engine.submit_call(lambda: restore(replica.pipeline, part), replica.device).result()
    replica.compared = part.step
    replica.views.renew()
    if offer.world != replica.world and replica.rank == 0:
        _say_resized(replica, offer)


def _vote(replica: Replica, offer: Offer | None, problem: Exception | None) -> Program[None]:
    rank, device = replica.rank, replica.device
    mine = [0, 0, 0, 0]
    if offer is not None and problem is None:
        mine = [1, offer.part.step, offer.fingerprint, offer.world]
    rows = (yield AllGather(torch.tensor(mine, dtype=torch.int64, device=device))).tolist()
    refused = [number for number, row in enumerate(rows) if row[0] != 1]
    if refused:
        yield from refuse(replica, "nothing was loaded on any rank", refused, problem)
    steps = [row[1] for row in rows]
    if len(set(steps)) > 1:
        each = ", ".join(f"rank {number} step {step}" for number, step in list(enumerate(steps))[:8])
        raise MismatchError(
            f"rank {rank}: ranks loaded checkpoints of different steps ({each}); nothing was loaded. Give "
            "all ranks the checkpoint of one step"
        )
    for column, what in ((2, "hold different shared models"), (3, "are of different numbers of ranks")):
        values = [row[column] for row in rows]
        if len(set(values)) > 1:
            raise MismatchError(
                f"rank {rank}: the checkpoints of step {steps[0]} {what}; {against_the_majority(values)}; "
                "nothing was loaded. Give all ranks the checkpoint of one run"
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
    return str(problem) if isinstance(problem, GradsieveError) else f"{type(problem).__name__}: {problem}"


def _fingerprint(part: RankState) -> int:
    shared = [each for key, each in part.memories.items() if key.startswith(("shared/", "total/"))]
    figures = torch.tensor(list(part.figures.values()), dtype=torch.float64, device="cpu")
    fields = []
    for state in part.states:
        tensors = checkpoint.fields_to_tensors(state, "")
        fields += [tensors[name] for name in replicated_fields(state)]
    return int(digest([figures, *fields, *shared]))


def _say_resized(replica: Replica, offer: Offer) -> None:
    old, new = offer.world, replica.world
    optimizers = (
        ""
        if offer.optimizers is None
        else f"; rank r took the optimizer of old rank r mod {old}"
        + (", the others' were left" if new < old else "")
    )
    _log.warning(
        "step %d: a checkpoint of %d ranks was loaded on %d. Residuals are kept: each of the new ranks "
        "has the mean of the old ones. Partitions were initialised again, thresholds were kept where the "
        "scheme has them for the whole model%s. A rank's data and batch are yours to set for the new number",
        replica.pipeline.step,
        old,
        new,
        optimizers,
    )
