"""What has no gradient does not move, in no bit, between steps and after a flush, whatever lies beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from multiproc.harness import Ranks

WORDS, WIDTH, STEPS = 60, 32, 30


class Mixed(nn.Module):
    """Tensors that share blocks of 256, were these not cut; none but the first and the last is a multiple."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.frozen = nn.Linear(WIDTH, WIDTH + 1)
        self.idle = nn.Parameter(torch.full((100,), 1e-4))
        self.out = nn.Linear(WIDTH + 1, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.out(self.frozen(self.embedding(words).mean(1)))
        return logits + 0.0 * self.idle.sum()


def at_rest(model: Mixed) -> dict[str, Tensor]:
    parts = {
        "padding": model.embedding.weight[0],
        "frozen": model.frozen.weight,
        "frozen bias": model.frozen.bias,
        "idle": model.idle,
    }
    return {name: part.detach().clone() for name, part in parts.items()}


def training(rank: int, asked: dict[str, Any]) -> tuple[dict[str, list[int]], bool]:
    """By name the steps after which it was not what it had been, the last one after a flush; and whether all
    else has moved."""
    torch.manual_seed(0)
    model = Mixed()
    frozen = list(model.frozen.parameters())
    others = [each for each in model.parameters() if all(each is not one for one in frozen)]
    groups = [{"params": others}, {"params": frozen, "lr": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
    ddp = DistributedDataParallel(model)
    changed: dict[str, list[int]] = {}
    before, start = at_rest(model), model.out.weight.detach().clone()
    sync = gradsieve.attach(ddp, optimizer, **asked)
    torch.manual_seed(1 + rank)
    for step in range(STEPS + 1):
        if step < STEPS:
            words = torch.randint(1, WORDS, (8, 6))
            words[:, 4:] = 0
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(words), words[:, 0]).backward()
            optimizer.step()
        else:
            sync.flush()
        for name, part in at_rest(model).items():
            if not torch.equal(part.view(torch.int32), before[name].view(torch.int32)):
                changed.setdefault(name, []).append(step)
    moved = (model.out.weight.detach() != start).float().mean() > 0.99
    sync.close()
    return changed, bool(moved and (model.embedding.weight[1:] != 0).all())


@pytest.mark.parametrize(
    "asked", [{"bits": 0.75}, {}, {"scheme": gradsieve.schemes.Stripes(values="int2")}], ids=str
)
def test_what_has_no_gradient_does_not_move(two: Ranks, asked: dict[str, Any]) -> None:
    for changed, moved in two.run(training, asked):
        assert changed == {}
        assert moved
