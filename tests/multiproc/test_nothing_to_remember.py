"""Scripts that call nothing of gradsieve's but `attach`: what they evaluate, save and copy is the model that
all ranks share, and training goes on from each rank's own."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import gradsieve
from gradsieve.parallel.ddp import DdpSync
from gradsieve.pipeline import StepPipeline
from gradsieve.testing.laws import same_bits
from multiproc.harness import Ranks

WIDTH = 24


class Training:
    def __init__(self, rank: int, **settings: Any) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 8))
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        settings = {"density": 0.02, **settings}
        self.sync: DdpSync = gradsieve.attach(self.ddp, self.optimizer, **settings)

    def loss(self, step: int, model: nn.Module | None = None) -> Tensor:
        source = torch.Generator().manual_seed(1000 * step + self.rank)
        inputs = torch.randn(16, WIDTH, generator=source)
        return (self.ddp if model is None else model)(inputs).sub(inputs[:, :8].sin()).square().mean()

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()
        self.optimizer.step()

    def evaluate(self, model: nn.Module) -> float:
        inputs = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(7))
        model.eval()
        with torch.no_grad():
            value = float((model(inputs) - inputs[:, :8].sin()).square().mean())
        model.train()
        return value

    @property
    def shared(self) -> list[Tensor]:
        assert isinstance(self.sync.pipeline, StepPipeline)
        shown = self.sync.replica.models.shown()
        return [shown[name].clone().view_as(p) for name, p in self.model.named_parameters()]

    @property
    def own(self) -> list[Tensor]:
        assert isinstance(self.sync.pipeline, StepPipeline)
        return [part.clone() for part in self.sync.replica.models.own.values()]


# -- a script as people write it ------------------------------------------------------------------------


def script(rank: int, folder: str) -> tuple[list[float], list[float], list[Tensor]]:
    """Early stopping by the loss on a set that all ranks have, the best model saved by rank 0 alone."""
    run, best, patience = Training(rank), float("inf"), 2
    values, sent = [], []
    for epoch in range(12):
        for step in range(5):
            run.step(5 * epoch + step)
        before = run.sync.pipeline.step
        value = run.evaluate(run.model)
        sent.append(run.sync.pipeline.step - before)
        values.append(value)
        if value < best:
            best = value
            if rank == 0:
                torch.save(run.ddp.module.state_dict(), Path(folder) / "best.pt")
                kept = run.shared
        elif (patience := patience - 1) == 0:
            break
    return values, sent, kept if rank == 0 else []


def test_a_script_that_only_attaches(two: Ranks, tmp_path: Path) -> None:
    (values, sent, kept), (others, _, _) = two.run(script, str(tmp_path))
    assert values == others, "ranks evaluated different models, and could stop at different epochs"
    assert set(sent) == {0}, "evaluating exchanged something"
    plain = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 8))
    plain.load_state_dict(torch.load(tmp_path / "best.pt", weights_only=True))
    assert same_bits([p.detach() for p in plain.parameters()], kept)


def rank_0_alone(rank: int) -> list[Tensor]:
    """Evaluates, saves and copies while the other rank goes on: nobody waits for anybody."""
    run = Training(rank)
    for step in range(6):
        run.step(step)
        if rank == 0:
            run.evaluate(run.model)
            copy.deepcopy(run.model.state_dict())
            copy.deepcopy(run.model)
    run.sync.flush()
    return [p.detach() for p in run.model.parameters()]


def alone_not(rank: int) -> list[Tensor]:
    run = Training(rank)
    for step in range(6):
        run.step(step)
    run.sync.flush()
    return [p.detach() for p in run.model.parameters()]


def test_rank_0_may_do_it_alone_and_the_training_does_not_notice(two: Ranks) -> None:
    seen, expected = two.run(rank_0_alone), two.run(alone_not)
    assert same_bits(seen[0], seen[1])
    assert same_bits(seen[0], expected[0])


# -- every way to take a model --------------------------------------------------------------------------


def takes(rank: int) -> dict[str, bool]:
    """Whether each gives the shared model, between two steps; and that it is not the rank's own."""
    run = Training(rank)
    averaged = AveragedModel(run.ddp)
    average = [p.detach().clone() for p in run.model.parameters()]
    for step in range(5):
        run.step(step)
        averaged.update_parameters(run.ddp)
        fresh = [p.detach().clone() for p in run.model.parameters()]
        average = (
            fresh if step == 0 else [a + (b - a) / (step + 1) for a, b in zip(average, fresh, strict=True)]
        )
    shared = run.shared
    file = io.BytesIO()
    torch.save(run.model, file)
    file.seek(0)
    found: dict[str, list[Tensor]] = {
        "state_dict": [*run.model.state_dict().values()],
        "of ddp": [*run.ddp.state_dict().values()],
        "deepcopy": [p.detach() for p in copy.deepcopy(run.model).parameters()],
        "deepcopy of ddp": [p.detach() for p in copy.deepcopy(run.ddp).parameters()],
        "AveragedModel": [p.detach() for p in AveragedModel(run.ddp).module.parameters()],
        "torch.save": [p.detach() for p in torch.load(file, weights_only=False).parameters()],
        "parameters": [p.detach() for p in run.model.parameters()],
    }
    out = {name: same_bits(parts, shared) for name, parts in found.items()}
    close = [
        torch.allclose(p, q, atol=1e-6) for p, q in zip(averaged.module.parameters(), average, strict=True)
    ]
    out["update_parameters"] = all(close)
    # savers take tensors in one storage for tied ones, and leave some out
    storages = [part.untyped_storage() for part in run.model.state_dict().values()]
    out["storages"] = [each.nbytes() for each in storages] == [4 * part.numel() for part in shared]
    out["apart"] = len({each.data_ptr() for each in storages}) == len(storages)
    assert not same_bits(run.own, [part.flatten() for part in shared])
    return out


def test_every_way_to_take_a_model_gives_the_shared_one(two: Ranks) -> None:
    for found in two.run(takes):
        assert all(found.values()), found


def plain_model(values: list[Tensor]) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 8))
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data = value.view_as(parameter)
    return model


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def in_evaluation_mode(rank: int, micro: int) -> list[bool]:
    """A model trained in evaluation mode, as people fine-tune; every backward is synchronised."""
    run = Training(rank)
    run.ddp.eval()
    right = []
    for step in range(6):
        run.optimizer.zero_grad()
        for part in range(micro):
            shown, before = run.shared, gradients_of(run.model)  # there is no preview in evaluation mode
            run.loss(10 * step + part).backward()
            alone = plain_model(shown)
            run.loss(10 * step + part, alone).backward()
            summed = [old + new for old, new in zip(before, gradients_of(alone), strict=True)]
            right.append(same_bits(gradients_of(run.model), summed))
            with torch.no_grad():
                value = run.model(torch.ones(1, WIDTH))
            shared = copy.deepcopy(run.model)
            for parameter, part_of_it in zip(shared.parameters(), run.shared, strict=True):
                parameter.data = part_of_it
            right.append(torch.equal(value, shared(torch.ones(1, WIDTH)).detach()))
        run.optimizer.step()
    right.append(run.sync.pipeline.step == 6 * micro)
    run.sync.flush()
    return right


@pytest.mark.parametrize("micro", [1, 2])
def test_a_model_may_be_trained_in_evaluation_mode(two: Ranks, micro: int) -> None:
    assert all(all(each) for each in two.run(in_evaluation_mode, micro))


class Net(nn.Module):
    """Not a Sequential: dynamo skips torch's own modules where it has to begin anew inside DDP's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs).tanh()


def compiled(rank: int, where: str, attached: bool = True) -> tuple[list[Tensor], int, int]:
    """The model, and how many graphs and breaks between them there were; evaluated after each step."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    model = Net()
    ddp: Any = DistributedDataParallel(
        torch.compile(model, backend=backend) if where == "inside" else model  # type: ignore[arg-type]
    )
    run = torch.compile(ddp, backend=backend) if where == "around" else ddp
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradsieve.attach(run, optimizer, density=0.05) if attached else None
    for step in range(6):
        optimizer.zero_grad()
        inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step + 50 * rank))
        run(inputs).square().mean().backward()
        optimizer.step()
        run.eval()
        with torch.no_grad():
            run(inputs)
        run.train()
    if sync is not None:
        sync.flush()
    breaks = sum(counters["graph_break"].values())
    return [p.detach().clone() for p in model.parameters()], len(graphs), breaks


@pytest.mark.parametrize("where", ["inside", "around"])
def test_compiled_models_train_as_others_do(two: Ranks, where: str) -> None:
    plain, seen = two.run(compiled, "nowhere"), two.run(compiled, where)
    assert same_bits(seen[0][0], seen[1][0])
    assert same_bits(seen[0][0], plain[0][0])
    without = two.run(compiled, where, attached=False)
    assert without[0][1] > 0, "nothing was compiled"
    assert [each[1:] for each in seen] == [each[1:] for each in without], "other graphs than with plain DDP"
