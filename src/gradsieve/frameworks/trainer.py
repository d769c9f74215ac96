"""Transformers' Trainer: call `attach` once it is made.

    trainer = Trainer(model, args, ...)
    gradsieve.frameworks.trainer.attach(trainer)                                      # the one new line
    trainer.train()

Every rank's state goes to the folder `gradsieve` within each `checkpoint-N`, and is removed with it. The
folder is written next to the Trainer's files, before these, and moved when they are there: with
`save_total_limit` the Trainer removes the checkpoint before as soon as it has written its own.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from gradsieve import attaching
from gradsieve.attached import drop_residual
from gradsieve.checkpoint import files
from gradsieve.errors import ConfigError
from gradsieve.frameworks.sidecar import FOLDER, load_from, new_pair, save_into
from gradsieve.parallel.ddp import DdpSync

# In the state of a Trainer whose checkpoints have our folder: which run it is; run and step make a pair.
_MARK = "gradsieve"
_STAGED = ".gradsieve-"


def attach(trainer: Trainer, **settings: Any) -> GradsieveCallback:
    """Attach in each `train()` of this trainer, with the settings of `gradsieve.attach`, and return the
    callback, which has the `sync`."""
    callback = GradsieveCallback(trainer, settings)
    trainer.add_callback(callback)
    train = trainer.train

    def noting(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Note the checkpoint for the callback, to which the Trainer does not give it."""
        callback.resumed_from = resume_from_checkpoint
        return train(resume_from_checkpoint, *args, **kwargs)

    trainer.train = noting
    return callback


class GradsieveCallback(TrainerCallback):
    """Attach, save, load and flush when the Trainer begins, saves, resumes and ends."""

    def __init__(self, trainer: Trainer, settings: dict[str, Any]) -> None:
        self._trainer, self._settings = trainer, settings
        self.sync: DdpSync | None = None
        self.resumed_from: str | bool | None = None
        self._staged = -1  # the step of which our folder is written and not yet moved

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Attach to the wrapped model; the Trainer has loaded model and optimizer if it resumes."""
        if state.is_hyper_param_search:
            raise ConfigError(
                f"rank {args.process_index}: a hyperparameter search puts checkpoints where callbacks "
                "do not find them: search with plain DDP, then attach() to the Trainer of the training itself"
            )
        if self.sync is not None and not self.sync.is_closed:
            self.sync.close()  # a training that broke off: `auto_find_batch_size` begins again
        self.sync = attaching.attach(self._trainer.model_wrapped, self._trainer.optimizer, **self._settings)
        source = self.resumed_from
        if source is True:
            source = get_last_checkpoint(args.output_dir)
        if source:
            promised, pair = _MARK in state.stateful_callbacks, _pair(state)
            folder, staged = Path(source) / FOLDER, _staged(Path(source).parent, state)
            if pair and not files.holds(folder, pair) and files.holds(staged, pair):
                folder = staged
            load_from(self.sync, folder, promised, pair)
        state.stateful_callbacks[_MARK] = {"run": new_pair()}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Write the folder if the Trainer's own callback, which comes first, has decided to save."""
        if control.should_save:
            self._stage(args, state)

    on_epoch_end = on_step_end

    def _stage(self, args: TrainingArguments, state: TrainerState) -> None:
        if args.save_only_model or self._staged == state.global_step:
            return
        if save_into(self.sync, _staged(Path(args.output_dir), state), _pair(state)):
            self._staged = state.global_step

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Move the folder into the Trainer's checkpoint; called on all ranks."""
        self._stage(args, state)  # if saving was decided late, as by `save_strategy="best"`
        if self._staged == state.global_step and args.process_index == 0:
            out = Path(args.output_dir)
            target = out / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / FOLDER
            shutil.rmtree(target, ignore_errors=True)  # of a run before this one
            _staged(out, state).rename(target)
            for left in out.glob(f"{_STAGED}*"):
                shutil.rmtree(left, ignore_errors=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Flush the residual into the model, which is then a plain one. If the best model was loaded, it
        stays as it was evaluated and saved."""
        if self.sync is None or self.sync.is_closed:
            return
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            drop_residual(self.sync.replica)
        else:
            self.sync.flush()
        self.sync.close()


def _staged(out: Path, state: TrainerState) -> Path:
    return out / f"{_STAGED}{state.global_step}"


def _pair(state: TrainerState) -> str:
    run = state.stateful_callbacks.get(_MARK, {}).get("run")
    return hashlib.sha256(f"{run} {state.global_step}".encode()).hexdigest()[:32] if run else ""
