"""One rank of a training by Lightning's Trainer, or by the same loop written by hand; prints how it ended.

torchrun --nproc-per-node 2 tests/multiproc/lightning_script.py trainer|hand [nan]
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.feedback.digest import digest

STEPS, ACCUMULATED, CLIP, VALIDATED_EVERY = 40, 2, 1.0, 10
SETTINGS: dict[str, Any] = {"density": 0.05, "dense_if_faster": False}
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
        self.judged: list[float] = []

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.judged.append(float(self(batch)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def on_train_start(self) -> None:
        sync = gradsieve.attach(self.trainer.model, self.trainer.optimizers, **SETTINGS)
        object.__setattr__(self, "sync", sync)


def by_trainer(spoiled: int) -> Learner:
    learner = Learner()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
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
    return learner


def by_hand(spoiled: int) -> Learner:
    learner = Learner()
    dist.init_process_group("gloo")
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
    return learner


def DataLoader(data: list[Any]) -> Any:  # noqa: N802 - it stands for torch's
    return torch.utils.data.DataLoader(data, batch_size=None)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    way, spoiled = sys.argv[1], 20 if "nan" in sys.argv else -1
    learner = (by_trainer if way == "trainer" else by_hand)(spoiled)
    sync = learner.sync
    assert sync is not None
    judged, skipped, steps = learner.judged, sync.pipeline.skipped, sync.pipeline.step
    learner.eval()
    shared = float(torch.stack([learner(batch).detach() for batch in batches(20_000, 8, 0)]).mean())
    sync.flush()
    loss = float(torch.stack([learner(batch).detach() for batch in batches(20_000, 8, 0)]).mean())
    end = {
        "rank": RANK,
        "bits": int(digest([p.detach() for p in learner.parameters()])),
        "loss": loss,
        "loss_before_flush": shared,
        "judged": judged,
        "skipped": skipped,
        "exchanges": steps,
        "finite": all(bool(p.isfinite().all()) for p in learner.parameters()),
    }
    os.write(1, f"{json.dumps(end)}\n".encode())  # in one piece: both ranks write to one pipe
    sync.close()


if __name__ == "__main__":
    main()
    os._exit(0)  # torch's threads and the end of Python race, with plain DDP too: not what is tested here
