"""Each law is a function that raises AssertionError if it is broken; the message begins with its name."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradsieve.testing.ranks import Round
from gradsieve.types import Outcome, Sparse, replicated_fields

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def same_bits(left: Any, right: Any) -> bool:
    """Compares dataclasses, lists and tensors to the last bit. NaN equals itself, 0.0 is not -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        bits = _BITS.get(left.dtype)
        return torch.equal(left.view(bits), right.view(bits)) if bits else torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if is_dataclass(left):
        return all(same_bits(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same_bits, left, right))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return bool(left == right)


def same_state(left: Any, right: Any) -> bool:
    """Compares the fields of a State that are not the rank's own, to the last bit."""
    return type(left) is type(right) and all(
        same_bits(getattr(left, name), getattr(right, name)) for name in replicated_fields(left)
    )


def check_conservation(round_: Round, exact: bool) -> None:
    """Checks that the sum of spent over ranks is the update, element by element."""
    spent = [outcome.spent.to_dense() for outcome in round_.outcomes]
    update = round_.outcomes[0].update.to_dense()
    total = torch.stack(spent).double().sum(0)
    # What was added up and then taken back in the same step rounds as well: an owner's sum, in few bits.
    touched = (torch.stack(spent) != 0).any(0) | (update != 0)
    added = torch.stack([*spent, *round_.accs_before]).double().abs().sum(0) * touched
    tolerance = _rounding(update.dtype, len(spent), added, exact)
    _within(
        total - update.double(), tolerance, f"conservation: in step {round_.step} spent and update differ"
    )


def check_nothing_lost(gradients: Tensor, updates: Tensor, residuals: Tensor, tolerance: Tensor) -> None:
    """Checks that all gradients of all ranks in a run are all updates and what all ranks still hold."""
    _within(
        gradients - updates - residuals,
        tolerance,
        "nothing lost: a gradient was lost or made up over the run",
    )


def check_replicated(outcomes: Sequence[Outcome[Any]]) -> None:
    """Checks that update and state are the same bits on every rank."""
    for rank, outcome in enumerate(outcomes):
        assert same_bits(outcome.update, outcomes[0].update), (
            f"identical ranks: rank {rank} has another update than rank 0"
        )
        assert same_state(outcome.state, outcomes[0].state), (
            f"identical ranks: rank {rank} has another state than rank 0"
        )


def check_same_states(states: Sequence[Sequence[Any]]) -> None:
    """Checks that the states of all buckets are the same on every rank, after `next_states`."""
    for rank, own in enumerate(states):
        assert all(map(same_state, own, states[0])), (
            f"identical ranks: rank {rank} has another state after next_states"
        )


def check_indices(sparse: Sparse, n: int) -> None:
    """Checks that indices are sorted, unique and within 0..n-1, with one value each."""
    assert sparse.numel == n, f"valid indices: the vector has {n} elements, not {sparse.numel}"
    if sparse.indices is None:
        assert 0 <= sparse.start <= sparse.stop <= n, "valid indices: a run beyond the vector"
        return
    assert sparse.indices.dtype == torch.int64, f"valid indices: {sparse.indices.dtype} is not int64"
    assert sparse.indices.shape == sparse.values.shape, "valid indices: not one value for each index"
    if sparse.indices.numel():
        assert int(sparse.indices.min()) >= 0, "valid indices: negative index"
        assert int(sparse.indices.max()) < n, "valid indices: index beyond the vector"
    assert bool((sparse.indices[1:] > sparse.indices[:-1]).all()), "valid indices: not sorted and unique"


def check_nothing_mutated(round_: Round) -> None:
    """Checks that `acc` and the state handed in are as they were."""
    for rank, (acc, before) in enumerate(zip(round_.accs, round_.accs_before, strict=True)):
        assert same_bits(acc, before), f"inputs unchanged: rank {rank}: acc was changed"
    for rank, (state, before) in enumerate(zip(round_.states, round_.states_before, strict=True)):
        assert same_bits(state, before), f"inputs unchanged: rank {rank}: the state handed in was changed"


def check_is_dense_sum(round_: Round) -> None:
    """Checks that the update is the sum in rank order of everything, and that nothing stays behind."""
    total = round_.accs_before[0].clone()
    for acc in round_.accs_before[1:]:
        total += acc
    for outcome, acc in zip(round_.outcomes, round_.accs_before, strict=True):
        assert same_bits(outcome.update.to_dense(), total), "dense at 1: update is not the dense sum"
        assert same_bits(outcome.spent.to_dense(), acc), "dense at 1: not everything was spent"


def check_one_threshold(states: Sequence[Any]) -> None:
    """Checks that all buckets of the model select by the same threshold, after `next_states`."""
    thresholds = [state.threshold for state in states if hasattr(state, "threshold")]
    assert all(same_bits(threshold, thresholds[0]) for threshold in thresholds), (
        f"one threshold: buckets have different thresholds {thresholds}"
    )


def rounds_freely(scheme: Any) -> bool:
    """Says whether values travel with scales of any size: then sums of whole numbers are rounded, too, and a
    little of them is left in the end."""
    return getattr(scheme, "values", "exact") in ("sign", "int2", "int4")


def check_drained(residuals: Sequence[Tensor], most: float | None = None) -> None:
    """Checks that the residual is empty; or, if its largest element was `most`, nearly so."""
    if most is not None:
        left = max((float(residual.abs().max()) for residual in residuals if len(residual)), default=0.0)
        assert left <= 0.05 * most, f"all is sent: {left} of {most} stays in the residual"
        return
    left = sum(int(residual.count_nonzero()) for residual in residuals)
    assert left == 0, f"all is sent: {left} elements stay in the residual"


def check_round(round_: Round, exact: bool) -> None:
    """Checks all laws that one round can show, first those that the others rest on."""
    check_nothing_mutated(round_)
    for outcome, acc in zip(round_.outcomes, round_.accs_before, strict=True):
        check_indices(outcome.update, acc.numel())
        check_indices(outcome.spent, acc.numel())
    check_replicated(round_.outcomes)
    check_conservation(round_, exact)


def _rounding(dtype: torch.dtype, additions: int, magnitude: Tensor, exact: bool) -> Tensor:
    """Returns how far a sum of `additions` numbers may be off, element by element."""
    return magnitude * (0.0 if exact else additions * torch.finfo(dtype).eps)


def _within(difference: Tensor, tolerance: Tensor, what: str) -> None:
    worst = difference.abs() - tolerance
    assert not (worst > 0).any(), f"{what} by up to {float(difference.abs().max())!r}"
    assert difference.isfinite().all(), f"{what}: not finite"
