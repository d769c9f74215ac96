"""Ranks that do different things are told so, at once and on all of them, by rank and by what differs."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
import gradsieve.wire
from gradsieve import DivergenceError, GradsieveError, MismatchError
from multiproc.harness import Ranks
from multiproc.outside import Lines
from multiproc.test_nothing_to_remember import Training

SOON = 18.0
"""Seconds, of a time-out of at least twenty."""


def told(rank: int, what: str, scheme: str = "exdyna") -> tuple[str, str, float]:
    """The error of this rank, by class and words, and how long it took."""
    start = time.perf_counter()
    try:
        SCENARIOS[what](rank, scheme)
    except GradsieveError as error:
        return type(error).__name__, str(error), time.perf_counter() - start
    return "", "nothing was noticed", 0.0


def flush_alone(rank: int, scheme: str) -> None:
    run = Training(rank, scheme=scheme)
    for step in range(6):
        run.step(step)
        if step == 3 and rank == 0:
            run.sync.flush()


def uneven_inputs(rank: int, scheme: str) -> None:
    run = Training(rank, scheme=scheme)
    for step in range(6 - rank):
        run.step(step)
    run.sync.flush()


def load_alone(rank: int, scheme: str) -> None:
    run = Training(rank, scheme=scheme)
    for step in range(3):  # in its second forward DDP rebuilds its buckets, which is a collective of its own
        run.step(step)
    saved = run.sync.state_dict()
    if rank == 0:
        run.sync.load_state_dict(saved)
    run.step(3)


def load_a_model_alone(rank: int, scheme: str) -> None:
    run = Training(rank, scheme=scheme)
    first = {name: part.clone() for name, part in run.model.state_dict().items()}
    for step in range(3):
        run.step(step)
    if rank == 0:
        run.model.load_state_dict(first)
    for step in range(3, 6):
        run.step(step)


def other_steps(rank: int, scheme: str) -> None:
    run, saved = Training(rank, scheme=scheme), {}
    for step in range(6):
        run.step(step)
        saved[step] = run.sync.state_dict()
    run.sync.load_state_dict(saved[5 - rank])


def other_runs(rank: int, scheme: str) -> None:
    run = Training(rank, scheme=scheme)
    run.step(0)
    saved = run.sync.state_dict()
    if rank == 1:
        saved = {key: part + 1 if "/shared/" in key else part for key, part in saved.items()}
    run.sync.load_state_dict(saved)


def other_settings(rank: int, scheme: str, **others: Any) -> None:
    Training(rank, scheme=scheme, **others)


def other_weights(rank: int, scheme: str) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(40, 40)
    gradsieve.GradientSync(
        model.named_parameters(), torch.optim.SGD(model.parameters(), lr=0.1), scheme=scheme
    )


def other_version(rank: int, scheme: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradsieve.wire, "VERSION", 7 + rank)
        Training(rank, scheme=scheme)


SCENARIOS: dict[str, Any] = {
    "flush alone": flush_alone,
    "uneven inputs": uneven_inputs,
    "load alone": load_alone,
    "load a model alone": load_a_model_alone,
    "other steps": other_steps,
    "other runs": other_runs,
    "other density": lambda rank, scheme: other_settings(rank, scheme, density=0.1 * (1 + rank)),
    "other scheme": lambda rank, scheme: other_settings(rank, scheme if rank else "topk"),
    "other treatment": lambda rank, scheme: other_settings(
        rank, scheme, exchange=gradsieve.Steps(small=1024 + rank)
    ),
    "other version": other_version,
    "other weights": other_weights,
}


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("flush alone", MismatchError, r"rank 0 called flush\(\) after step 4 while rank 1 went on training"),
        ("uneven inputs", MismatchError, r"rank 1 called flush\(\) after step 5 .* rank 0 had more batches"),
        ("load alone", MismatchError, r"rank 0 called load_state_dict\(\) after step 3 while rank 1 went on"),
        ("load a model alone", MismatchError, "a model was loaded into the parameters"),
        (
            "other steps",
            MismatchError,
            r"different steps \(rank 0 step 6, rank 1 step 5\); nothing was loaded",
        ),
        ("other runs", MismatchError, "hold different shared models"),
        ("other density", MismatchError, "differ in density: rank 0 has 0.1; rank 1 has 0.2"),
        ("other scheme", MismatchError, "differ in scheme: rank 0 has TopK; rank 1 has ExDyna"),
        ("other treatment", MismatchError, "differ in exchange: .*small=1025"),
        ("other version", MismatchError, "version of gradsieve's messages: rank 0 has 7; rank 1 has 8"),
        ("other weights", DivergenceError, r"different weights; .* in 2 of 2 tensors \(weight, bias\)"),
    ],
)
def test_both_are_told(two: Ranks, what: str, kind: type[Exception], words: str) -> None:
    for name, said, seconds in two.run(told, what):
        assert name == kind.__name__, said
        assert re.search(words, said), said
        assert seconds < SOON


def without_steps(rank: int, steps: int) -> list[str]:
    said, run = Lines(), Training(rank)
    for step in range(steps):
        run.optimizer.zero_grad()
        (run.loss(step) * (float("nan") if rank == 1 else 1.0)).backward()
        run.optimizer.step()
    assert all(p.isfinite().all() for p in run.model.parameters())
    return [line for line in said.lines if "took no step" in line]


def test_a_rank_that_skips_ten_steps_is_named_on_all(two: Ranks) -> None:
    assert two.run(without_steps, 9) == [[], []]
    for lines in two.run(without_steps, 40):
        assert len(lines) == 1, "said once, not in every step"
        assert "rank 1 took no step between the last 10 exchanges" in lines[0]


def unfrozen(rank: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 4))
    model[0].weight.requires_grad_(False)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradsieve.attach(ddp, optimizer, density=0.1)
    for step in range(4):
        if step == 2:
            model[0].weight.requires_grad_(True)
        try:
            ddp(torch.randn(4, 8)).sum().backward()
        except gradsieve.ConfigError as error:
            return str(error)
        optimizer.step()
    return "nothing was noticed"


def test_what_was_unfrozen_later_is_named(two: Ranks) -> None:
    for said in two.run(unfrozen):
        assert "0.weight required no gradient when the sync was made" in said


def uncovered(rank: int) -> list[list[str]]:
    out = []
    for both in (False, True):
        said = Lines()
        model = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 4))
        first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
        ddp = DistributedDataParallel(model)
        gradsieve.attach(ddp, [first, second] if both else first, density=0.1)
        out.append([line for line in said.lines if "no optimizer given" in line])
    return out


def test_what_no_optimizer_has_is_named(two: Ranks) -> None:
    (one, both), other = two.run(uncovered)
    assert len(one) == 1
    assert "2 of 4 parameters (1.weight, 1.bias)" in one[0]
    assert both == []
    assert other == [[], []], "ranks that differ in it were refused before"
