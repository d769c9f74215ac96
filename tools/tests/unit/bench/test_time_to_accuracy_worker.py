"""The ranks of `bench time-to-accuracy`, as a world of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsieve_tools.bench.tasks import sized as sized_tasks
from gradsieve_tools.bench.tasks.data import Data, DataSet
from gradsieve_tools.bench.tasks.training import Metric
from gradsieve_tools.bench.time_to_accuracy.measure import Plan
from gradsieve_tools.bench.time_to_accuracy.worker import Learner, measure

SYNCS = ["dense", "auto", "stripes:values=int4", "exdyna", "fp16"]
PLAN = Plan(1, None, None, "mlp", 3_000, 0.05, SYNCS, steps=12, seeds=2)


def few_numbers() -> DataSet:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(300, 40, generator=random)
    target = (inputs @ torch.randn(40, 3, generator=random)).argmax(1)
    whole = Data((inputs,), target)
    return DataSet(whole.take(slice(200)), whole.take(slice(200, None)), kind=target[:200])


def narrow(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(40, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    )


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def learn_numbers(monkeypatch: pytest.MonkeyPatch, metric: Metric) -> None:
    known = sized_tasks.TASKS["mlp"]
    recipe = replace(known.recipe, data=few_numbers, metric=metric)
    monkeypatch.setitem(
        sized_tasks.TASKS, "mlp", replace(known, recipe=recipe, model=narrow, rate=lambda _: 0.2)
    )


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    learn_numbers(monkeypatch, "accuracy")


def weights(learner: Learner) -> Tensor:
    return torch.cat([each.detach().flatten() for each in learner.training.model.parameters()])


@pytest.mark.usefixtures("numbers")
def test_every_sync_starts_from_the_same_weights_on_the_same_batches() -> None:
    with (
        closing(Learner("dense", PLAN, 3)) as dense,
        closing(Learner("auto", PLAN, 3)) as auto,
        closing(Learner("dense", PLAN, 4)) as other,
    ):
        first = next(dense.batches).tolist()
        assert torch.equal(weights(dense), weights(auto))
        assert first == next(auto.batches).tolist()
        assert len(first) == sized_tasks.TASKS["mlp"].batch
        assert not torch.equal(weights(dense), weights(other))
        assert first != next(other.batches).tolist()


@pytest.mark.usefixtures("numbers")
def test_a_rank_is_evaluated_by_its_own_model_and_shows_the_shared_one_after_it() -> None:
    plan = replace(PLAN, density=0.001)
    with closing(Learner("exdyna", plan, 0)) as learner:
        learner.train(20)
        assert learner.sync is not None
        assert learner.sync.replica.models is not None
        shared, shared_value = weights(learner), learner.training.evaluate_as_is()
        value = learner.value()
        assert torch.equal(weights(learner), shared)
        learner.sync.replica.models.show_own()
        assert value == pytest.approx(learner.training.evaluate_as_is())
        assert value != pytest.approx(shared_value), "the two models are too much alike to tell"


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_all_aim_at_what_dense_of_the_same_seed_ends_with(
    metric: Metric, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn_numbers(monkeypatch, metric)
    runs = measure(asdict(PLAN))
    assert [(run["name"], run["seed"]) for run in runs] == [(sync, seed) for seed in (0, 1) for sync in SYNCS]
    for run in runs:
        dense = runs[len(SYNCS) * run["seed"]]
        assert run["target"] == pytest.approx(sum(dense["curve"]["values"][-3:]) / 3, abs=1e-6)
        assert run["curve"]["metric"] == metric
        assert run["curve"]["seconds"] == sorted(run["curve"]["seconds"])
        assert run["parameters"] == pytest.approx(3_000, abs=100)
    fp16 = runs[len(SYNCS) - 1]["curve"]["values"]
    assert fp16[:3] == pytest.approx(runs[0]["curve"]["values"][:3], abs=0.02)
    assert runs[0]["target"] != runs[len(SYNCS)]["target"]
    first, last = runs[0]["curve"]["values"][0], runs[0]["target"]
    assert last > first if metric == "accuracy" else last < first
