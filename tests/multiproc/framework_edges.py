"""What users do with frameworks beside training to the end: run on every rank, told by what it returns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import gradsieve
from gradsieve.frameworks import accelerate, sidecar, trainer
from gradsieve.frameworks import lightning as ours
from gradsieve.frameworks.lightning import GradsieveStrategy
from gradsieve.optimizers import as_list
from multiproc.outside import Lines

SETTINGS: dict[str, Any] = {"bits": 0.75}


class Fit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(inputs) - labels).square().mean()}


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    inputs = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return [{"inputs": each, "labels": each[:4].sin()} for each in inputs]


def whole(seed: int) -> dict[str, Tensor]:
    every = rows(32, seed)
    return {key: torch.stack([row[key] for row in every]) for key in ("inputs", "labels")}


def said(call: Callable[[], Any]) -> str:
    """The error that it ends with."""
    try:
        call()
    except (gradsieve.ConfigError, gradsieve.errors.Malformed, gradsieve.MismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# -- Accelerate -----------------------------------------------------------------------------------------


def prepared() -> tuple[Accelerator, Any, Any]:
    accelerator, model = Accelerator(cpu=True), Fit()
    accelerator.gradient_accumulation_steps = 1  # it is of the process, and others came before
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))


def step(accelerator: Accelerator, model: Any, optimizer: Any, seed: int) -> None:
    with accelerator.accumulate(model):
        accelerator.backward(model(**whole(10 * seed + accelerator.process_index))["loss"])
        optimizer.step()
        optimizer.zero_grad()


def registered_by_the_user(folder: Path) -> dict[str, str]:
    """By `gradsieve.attach` alone, which takes what `prepare` gave."""
    out = {}
    accelerator, model, optimizer = prepared()
    sync = gradsieve.attach(model, optimizer, **SETTINGS)
    step(accelerator, model, optimizer, 1)
    accelerator.register_for_checkpointing(sync)
    out["alone"] = said(lambda: accelerator.save_state(folder / "wrong"))
    sync.close()
    accelerator, model, optimizer = prepared()
    out["unprepared"] = said(lambda: accelerate.attach(accelerator, model, optimizer.optimizer, **SETTINGS))
    return out


def of_plain_ddp(folder: Path) -> dict[str, Any]:
    """A checkpoint from before gradsieve is gone on from, with a word about it; one of after its end too."""
    accelerator, model, optimizer = prepared()
    step(accelerator, model, optimizer, 1)
    accelerator.save_state(folder / "plain")
    before = [p.detach().clone() for p in model.parameters()]
    dist.barrier()
    accelerator, model, optimizer = prepared()
    sync, lines = accelerate.attach(accelerator, model, optimizer, **SETTINGS), Lines()
    accelerator.load_state(folder / "plain")
    same = all(map(torch.equal, before, model.parameters()))
    step(accelerator, model, optimizer, 2)
    sync.close()
    accelerator.save_state(folder / "closed")
    return {"same": same, "lines": lines.lines, "closed": (folder / "closed" / "gradsieve").exists()}


# -- Trainer --------------------------------------------------------------------------------------------


def trainer_in(folder: Path, steps: int, **more: Any) -> Trainer:
    args = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **more,
    )
    return Trainer(Fit(), args, train_dataset=rows(256, 1), eval_dataset=rows(32, 2))


def best_at_the_end(folder: Path) -> dict[str, Any]:
    """Evaluated and saved every two steps, one checkpoint kept, the best one loaded at the end."""
    run = trainer_in(
        folder, 6, eval_strategy="steps", eval_steps=2, save_total_limit=1, load_best_model_at_end=True
    )
    callback, lines = trainer.attach(run, **SETTINGS), Lines()
    run.train()
    assert callback.sync is not None
    best = Path(str(run.state.best_model_checkpoint))
    plain = Fit()
    plain.load_state_dict(load_file(best / "model.safetensors"))
    evaluated = [line["eval_loss"] for line in run.state.log_history if "eval_loss" in line]
    return {
        "evaluated": evaluated,
        "of the file": float(plain(**whole(2))["loss"]),
        "is the best": all(map(torch.equal, plain.parameters(), run.model.parameters())),
        "kept": sorted(str(path.relative_to(folder)) for path in folder.rglob("manifest.json")),
        "closed": callback.sync.is_closed,
        "lines": lines.lines,
    }


def lost_folder(folder: Path) -> dict[str, str]:
    """A Trainer's checkpoint whose folder of ours is gone, as after a crash between the two."""
    run = trainer_in(folder, 2)
    trainer.attach(run, **SETTINGS)
    run.train()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "checkpoint-2" / "gradsieve")
    dist.barrier()
    again = trainer_in(folder, 4)
    trainer.attach(again, **SETTINGS)
    return {"lost": said(lambda: again.train(resume_from_checkpoint=True))}


# -- Lightning ------------------------------------------------------------------------------------------


class Learner(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.fit = Fit()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.fit(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fitted(
    steps: int, *callbacks: lightning.Callback, **how: Any
) -> tuple[lightning.Trainer, GradsieveStrategy]:
    """Return what has trained, and its strategy; a training that fails has its sync closed."""
    strategy = GradsieveStrategy(process_group_backend="gloo", **SETTINGS)
    run = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        run.fit(Learner(), torch.utils.data.DataLoader(rows(256, 1), batch_size=8), **how)
    except BaseException:
        if strategy.sync is not None:
            strategy.sync.close()
        raise
    assert strategy.sync is not None
    return run, strategy


def last_of_lightning(folder: Path) -> dict[str, Any]:
    """One checkpoint kept and a link to it, gone on from by the link; then one of the finished training."""
    ends: list[int] = []

    def kept_every_two(steps: int, **how: Any) -> lightning.Trainer:
        keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_last="link")
        run, strategy = fitted(steps, keep, **how)
        ends.append(strategy.sync.pipeline.step)
        return run

    run = kept_every_two(4)
    assert isinstance(run.lightning_module.optimizers(), LightningOptimizer)
    unwrapped = as_list(run.lightning_module.optimizers()) == run.optimizers
    kept = sorted(path.name for path in folder.iterdir())
    lines = Lines()
    run = kept_every_two(6, ckpt_path=str(folder / "last.ckpt"), weights_only=True)
    went_on = list(lines.lines)
    run.save_checkpoint(folder / "end.ckpt")
    kept_every_two(8, ckpt_path=str(folder / "end.ckpt"), weights_only=True)
    return {
        "kept": kept,
        "exchanges": ends,
        "unwrapped": unwrapped,
        "went on": went_on,
        "after the end": lines.lines,
    }


def resumed_at_the_end(folder: Path) -> dict[str, Any]:
    """A training of four steps, saved after the fourth, gone on from with four steps to make: none are left,
    and Lightning and the Trainer return at once. What waited still goes into the model."""
    out: dict[str, Any] = {}

    def lightning_ends(**how: Any) -> list[Tensor]:
        run, strategy = fitted(4, ModelCheckpoint(folder, "{step}", every_n_train_steps=4), **how)
        assert strategy.sync.is_closed
        return [p.detach().clone() for p in run.lightning_module.parameters()]

    lines = Lines()
    first = lightning_ends()
    saved = torch.load(folder / "step=4.ckpt", weights_only=True)["state_dict"]
    again = lightning_ends(ckpt_path=str(folder / "step=4.ckpt"), weights_only=True)
    out["lightning"] = all(map(torch.equal, first, again))
    out["something waited"] = not all(map(torch.equal, first, saved.values()))
    for resumed in (False, True):  # this one was seen to take a step more
        run = trainer_in(folder / "trainer", 4)
        callback = trainer.attach(run, **SETTINGS)
        run.train(resume_from_checkpoint=resumed)
        assert callback.sync is not None
        out["trainer"] = callback.sync.is_closed
        dist.barrier()
    return out | {"lines": lines.lines}


# -- pairs: what a kill between our folder and the framework's file leaves ----------------------------------


def copied_by_rank_0(source: Path, target: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)
    dist.barrier()


def torn_accelerate(folder: Path) -> dict[str, Any]:
    """Three saves to one folder. With Accelerate's files of the first, of the second, of the third."""
    accelerator, model, optimizer = prepared()
    sync = accelerate.attach(accelerator, model, optimizer, **SETTINGS)
    for number in (1, 2, 3):
        step(accelerator, model, optimizer, number)
        accelerator.save_state(folder / "same")
        copied_by_rank_0(folder / "same", folder / str(number))
    found: list[Any] = []
    for number in (1, 2, 3):
        if dist.get_rank() == 0:
            shutil.rmtree(folder / str(number) / "gradsieve")
        copied_by_rank_0(folder / "same" / "gradsieve", folder / str(number) / "gradsieve")
        refusal = said(lambda number=number: accelerator.load_state(folder / str(number)))
        found.append(refusal if refusal != "nothing" else sync.pipeline.step)
    sync.close()
    return {"found": found}


class SavedTwice(lightning.Callback):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step in (2, 4):
            trainer.save_checkpoint(self._folder / "x.ckpt")
            copied_by_rank_0(self._folder / "x.ckpt", self._folder / f"{trainer.global_step}.ckpt")


def torn_lightning(folder: Path) -> dict[str, Any]:
    """Saved twice under one name. The first file, with the folder after the second save, finished or not."""
    found: list[Any] = []

    def again() -> None:
        _, strategy = fitted(3, ckpt_path=str(folder / "x.ckpt"), weights_only=True)
        found.append(strategy.sync.pipeline.step)

    for finish in (sidecar.finish, lambda *_: None):
        with mock.patch.object(ours, "finish", finish):
            fitted(4, SavedTwice(folder))
        copied_by_rank_0(folder / "2.ckpt", folder / "x.ckpt")
        refusal = said(again)
        if refusal != "nothing":
            found.append(refusal)
    return {"found": found}


def torn_trainer(folder: Path) -> dict[str, Any]:
    """One that has the folder of another save; and one that was killed before ours was moved to its own."""
    run = trainer_in(folder, 4)
    trainer.attach(run, **SETTINGS)
    run.train()
    left = sorted(path.name for path in folder.iterdir())
    last, found = folder / "checkpoint-4" / "gradsieve", []
    copied_by_rank_0(last, folder / "moved")
    if dist.get_rank() == 0:
        shutil.rmtree(last)
    copied_by_rank_0(folder / "checkpoint-2" / "gradsieve", last)
    for _ in range(2):
        again = trainer_in(folder, 6)
        callback = trainer.attach(again, **SETTINGS)
        refusal = said(lambda again=again: again.train(resume_from_checkpoint=True))
        assert callback.sync is not None
        found.append(refusal if refusal != "nothing" else callback.sync.pipeline.step)
        callback.sync.close()
        copied_by_rank_0(folder / "moved", folder / ".gradsieve-4")
    return {"found": found, "left": left}


EDGES = (
    torn_accelerate,
    torn_lightning,
    torn_trainer,
    registered_by_the_user,
    of_plain_ddp,
    best_at_the_end,
    lost_folder,
    last_of_lightning,
    resumed_at_the_end,
)


def main(folder: Path) -> list[str]:
    """A line of JSON for each."""
    out = []
    for edge in EDGES:
        found = edge(folder / edge.__name__)
        out.append(json.dumps({"name": edge.__name__, "rank": dist.get_rank(), **found}))
    return out
