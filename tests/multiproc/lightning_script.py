"""One rank of a training by Lightning's Trainer, or by the same loop written by hand; tells how it ended."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.frameworks.lightning import GradsieveStrategy
from gradsieve.ranks_alike import digest

STEPS, ACCUMULATED, CLIP, VALIDATED_EVERY = 40, 2, 1.0, 10
SETTINGS: dict[str, Any] = {"density": 0.05}
RANK = int(os.environ["RANK"])


def batches(first: int, count: int, rank: int, spoiled: int = -1) -> list[tuple[Tensor, Tensor]]:
    """Of a function of 32 numbers; that of number `spoiled` is not finite on rank 1."""
    true = torch.randn(32, 8, generator=torch.Generator().manual_seed(7)) / 32**0.5
    out = []
    for number in range(first, first + count):
        inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * number + rank))
        target = (3 * inputs @ true).sin() + 1.0
        out.append((inputs * float("nan") if number == spoiled and rank == 1 else inputs, target))
    return out


class Learner(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
        self.sync: gradsieve.GradientSync | None = None
        self.evaluated: list[float] = []

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.evaluated.append(float(self(batch)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def by_trainer(spoiled: int) -> Learner:
    learner, strategy = Learner(), GradsieveStrategy(process_group_backend="gloo", **SETTINGS)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=CLIP,
        val_check_interval=VALIDATED_EVERY,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    data = batches(0, STEPS * ACCUMULATED, RANK, spoiled)
    trainer.fit(learner, DataLoader(data), DataLoader(batches(10_000, 4, 0)))
    learner.sync = strategy.sync
    return learner


def by_hand(spoiled: int) -> Learner:
    learner = Learner()
    ddp, optimizer = DistributedDataParallel(learner), learner.configure_optimizers()
    learner.sync = gradsieve.attach(ddp, optimizer, **SETTINGS)
    for number, batch in enumerate(batches(0, STEPS * ACCUMULATED, RANK, spoiled), start=1):
        whole = number % ACCUMULATED == 0
        with contextlib.nullcontext() if whole else ddp.no_sync():
            (ddp(batch) / ACCUMULATED).backward()
        if whole:
            nn.utils.clip_grad_norm_(learner.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if number % VALIDATED_EVERY == 0:
            learner.eval()
            with torch.no_grad():
                for each in batches(10_000, 4, 0):
                    learner.validation_step(each)
            learner.train()
    learner.sync.flush()
    learner.sync.close()
    return learner


def DataLoader(data: list[Any]) -> Any:  # noqa: N802 - it stands for torch's
    return torch.utils.data.DataLoader(data, batch_size=None)


def ended(way: str) -> str:
    """A line of JSON."""
    spoiled = 20 if way == "nan" else -1
    learner = by_hand(spoiled) if way == "hand" else by_trainer(spoiled)
    sync = learner.sync
    assert sync is not None
    learner.eval()
    loss = float(torch.stack([learner(batch).detach() for batch in batches(20_000, 8, 0)]).mean())
    end = {
        "name": f"lightning {way}",
        "rank": RANK,
        "bits": int(digest([p.detach() for p in learner.parameters()])),
        "loss": loss,
        "evaluated": learner.evaluated,
        "skipped": sync.pipeline.skipped,
        "exchanges": sync.pipeline.step,
        "finite": all(bool(p.isfinite().all()) for p in learner.parameters()),
    }
    return json.dumps(end)


def main() -> list[str]:
    return [ended("trainer"), ended("hand"), ended("nan")]
