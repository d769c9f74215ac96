"""How a user meets it: clear refusals, uneven inputs, figures of a step, an end that leaves nothing."""

from __future__ import annotations

import gc
import os
import re
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve import ConfigError, runner, sync
from gradsieve.comm.engine import Engine
from multiproc.harness import Ranks
from multiproc.models import Whole
from multiproc.training import (
    Plan,
    Run,
    Seen,
    check_applied,
    check_nothing_lost,
    check_replicas,
    usual,
)

every_scheme = pytest.mark.parametrize("scheme", usual())


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Whole(Plan().shapes)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _wrapped() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model, optimizer = _model()
    return DistributedDataParallel(model), optimizer


def attach_twice() -> None:
    ddp, optimizer = _wrapped()
    gradsieve.attach(ddp, optimizer)
    gradsieve.attach(ddp, optimizer)


def attach_to_a_plain_model() -> None:
    gradsieve.attach(*_model())  # type: ignore[arg-type]


def attach_an_unknown_scheme() -> None:
    gradsieve.attach(*_wrapped(), scheme="exdnya")


def attach_with_density(density: float) -> None:
    gradsieve.attach(*_wrapped(), density=density)


def attach_with_two_densities() -> None:
    gradsieve.attach(*_wrapped(), scheme=gradsieve.schemes.ExDyna(density=0.01), density=0.02)


def attach_to_a_frozen_model() -> None:
    model, optimizer = _model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    gradsieve.GradientSync(model.named_parameters(), optimizer)


def attach_complex_parameters() -> None:
    model = nn.ParameterDict({"phase": nn.Parameter(torch.zeros(4, dtype=torch.complex64))})
    gradsieve.GradientSync(model.named_parameters(), torch.optim.SGD(model.parameters(), lr=0.1))


def attach_outside_a_group() -> None:
    model, optimizer = _model()
    with mock.patch.object(dist, "is_initialized", return_value=False):
        gradsieve.GradientSync(model.named_parameters(), optimizer)


class Sieve(nn.Linear):
    """Its attribute has nothing to do with gradients."""

    sparse = True


def attach_a_module_with_an_unrelated_attribute() -> None:
    model = nn.Sequential(Sieve(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradsieve.attach(DistributedDataParallel(model), optimizer, density=0.5).close()


def attach_sparse_gradients(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(8, 8, sparse=True))
    gradsieve.attach(DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1))


REFUSALS: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
    (attach_twice, (), ConfigError, r"attached to this model already: close\(\) it first"),
    (attach_to_a_plain_model, (), ConfigError, r"not Whole: wrap it first, ddp = DistributedData"),
    (attach_an_unknown_scheme, (), ConfigError, "no scheme is called 'exdnya'; did you mean 'exdyna'?"),
    *[
        (attach_with_density, (density,), ConfigError, "density must be above 0 and at most 1")
        for density in (0.0, -0.1, 1.5, float("nan"))
    ],
    (attach_with_two_densities, (), ConfigError, "drop one"),
    (attach_to_a_frozen_model, (), ConfigError, "no parameter that requires a gradient"),
    (attach_complex_parameters, (), ConfigError, "'phase' is torch.complex64"),
    (attach_outside_a_group, (), ConfigError, "init_process_group"),
    *[
        (attach_sparse_gradients, (kind,), ConfigError, "module '0' makes sparse gradients")
        for kind in (nn.Embedding, nn.EmbeddingBag)
    ],
]


def refusals_then_training(rank: int) -> int:
    """All refusals one after the other, then a training that none of them has disturbed. No group is made
    for what is refused: a rank that closes it fails those that are still connecting."""
    for attempt, arguments, kind, words in REFUSALS:
        with mock.patch.object(sync, "Engine", wraps=Engine) as made:
            with pytest.raises(kind, match=words):
                attempt(*arguments)
            assert made.call_count == (attempt is attach_twice)
    attach_a_module_with_an_unrelated_attribute()
    return Run(rank, Plan()).train().sync.pipeline.step


def test_what_cannot_work_is_refused_clearly(two: Ranks) -> None:
    assert two.run(refusals_then_training) == [6, 6]


def train_uneven(rank: int, plan: Plan, batches: tuple[int, ...], every: int) -> tuple[Seen, int]:
    """Then six even steps."""
    run = Run(rank, plan)
    with mock.patch.object(runner, "VERIFY_EVERY", every):
        with Join([run.ddp]):
            run.train(batches[rank])
        steps = run.sync.pipeline.step
        run.sync.verify()
        run.train(6)
    return run.report(), steps


@every_scheme
@pytest.mark.parametrize("batches", [(5, 8), (8, 5)])
def test_uneven_inputs_neither_hang_nor_lose_anything(
    two: Ranks, scheme: str, batches: tuple[int, int]
) -> None:
    """A rank without input replays the exchange with zeros; comparisons would come due while it does."""
    seen, steps = zip(*two.run(train_uneven, Plan(scheme), batches, 3, timeout=30.0), strict=True)
    assert steps == (8, 8)
    check_replicas(seen)
    longest_first = seen if batches[0] == 8 else seen[::-1]  # only it has seen every update
    check_nothing_lost(longest_first)
    check_applied(longest_first[:1])


def train_and_measure(rank: int, plan: Plan) -> dict[str, float]:
    return Run(rank, plan).train().sync.metrics()


def named(metrics: dict[str, float]) -> set[str]:
    return {"seconds_" if name.startswith("seconds_") else name for name in metrics}


def documented_metrics() -> set[str]:
    page = Path(__file__).parents[2] / "docs" / "recording.md"
    section = page.read_text().split("### All keys\n")[1].split("\n## ")[0]
    keys = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`(\w+)[.`]", " ".join(keys)))


def test_every_metric_of_the_reference_is_there(two: Ranks) -> None:
    found = set[str]()
    for scheme in ("exdyna", "deft", "oktopk", "spardl"):
        found |= named(two.run(train_and_measure, Plan(scheme, exchange=gradsieve.Steps()))[0])
    assert found == documented_metrics()


@dataclass
class Left:
    """What there is after each round of attach, train, close and forget."""

    threads: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    alive: list[bool] = field(default_factory=list)
    """Is the model still in memory?"""


def attach_and_close(rank: int, times: int) -> Left:
    left = Left()
    for _ in range(times):
        run = Run(rank, Plan(steps=1)).train()
        run.sync.close()
        model = weakref.ref(run.model)
        del run
        gc.collect()
        dist.barrier()
        left.threads.append(threading.active_count())
        left.files.append(len(os.listdir("/proc/self/fd")))
        left.alive.append(model() is not None)
    return left


def test_what_is_closed_and_forgotten_leaves_nothing(two: Ranks) -> None:
    """No thread, no socket, no memory: jobs attach thousands of times in notebooks and sweeps."""
    for left in two.run(attach_and_close, 10, timeout=20.0):
        assert len(set(left.threads[2:])) == 1, left
        assert left.files[-1] <= left.files[2] + 2, left
        assert not any(left.alive), left
