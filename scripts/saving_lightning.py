"""The training by Lightning of `saving_ranks.py`: to one file name each time, with our folder beside it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from saving_ranks import SETTINGS, Rank, batch, model, tensors_of
from torch import Tensor, nn

from gradsieve.frameworks.lightning import GradsieveStrategy
from gradsieve.ranks_alike import digest


class Learner(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Saves(lightning.Callback):
    def __init__(self, rank: Rank, strategy: GradsieveStrategy, file: Path) -> None:
        self._rank, self._strategy, self._file = rank, strategy, file

    def _digest(self, trainer: lightning.Trainer) -> int:
        assert self._strategy.sync is not None
        # Of the model as well: it is from Lightning's file, the rest from our folder.
        own = int(digest([p.detach() for p in trainer.model.parameters()]))
        return own ^ tensors_of(self._strategy.sync.state_dict(), trainer.optimizers[0])

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self._file.exists():
            assert self._strategy.sync is not None
            steps = trainer.global_step, self._strategy.sync.pipeline.step
            assert len({*steps}) == 1, f"Lightning's file is of step {steps[0]}, our folder of {steps[1]}"
            self._rank.loaded(trainer.global_step, self._digest(trainer))

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        save = partial(trainer.save_checkpoint, self._file)
        self._rank.stepped(trainer.global_step, self._digest(trainer), save)


class Until(lightning.Callback):
    """Two steps, from wherever it was gone on."""

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 2


def train(rank: Rank) -> None:
    names = {"RANK": rank.number, "LOCAL_RANK": rank.number, "WORLD_SIZE": rank.case.world}
    names |= {"LOCAL_WORLD_SIZE": rank.case.world, "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    file = Path(rank.case.folder) / "last.ckpt"
    strategy = GradsieveStrategy(process_group_backend="gloo", **SETTINGS)
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=rank.case.world,
        max_steps=1 << 30,
        callbacks=[Saves(rank, strategy, file), Until()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = [tuple(each[0] for each in batch(number, 0)) for number in range(4)] * 8000
    loader = torch.utils.data.DataLoader(rows, batch_size=8)  # type: ignore[arg-type]
    how = {"ckpt_path": str(file), "weights_only": True} if file.exists() else {}
    trainer.fit(Learner(), loader, **how)
