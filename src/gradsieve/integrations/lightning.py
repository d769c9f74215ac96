"""Lightning: a strategy in the place of "ddp".

    trainer = lightning.Trainer(strategy=gradsieve.integrations.lightning.GradsieveStrategy())

A strategy and not a callback: it alone is told on all ranks which file is saved, loaded and removed. Every
rank's state goes to a folder beside that file, `NAME.ckpt.gradsieve`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from gradsieve.integrations.beside import load_from, save_into
from gradsieve.integrations.ddp import DdpSync, attach

_MARK = "gradsieve"
"""In a checkpoint with a folder beside it: one without it is of plain DDP, or of the end of a training."""


class GradsieveStrategy(DDPStrategy):
    """DDP with the exchange of `gradsieve.attach`. Takes the settings of both, by name."""

    def __init__(self, **settings: Any) -> None:
        ours = attach.__kwdefaults__ or {}
        super().__init__(**{name: value for name, value in settings.items() if name not in ours})
        self._settings = {name: value for name, value in settings.items() if name in ours}
        self.sync: DdpSync | None = None
        self._loading: str = ""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.sync = attach(self.model, self.optimizers, **self._settings)

    def on_train_end(self) -> None:
        """What still waits goes into the model, which is then a plain one: to be tested, saved, taken on."""
        super().on_train_end()
        if self.sync is not None and not self.sync.is_closed:
            self.sync.flush()
            self.sync.close()

    def teardown(self) -> None:
        """Also of a training that broke off."""
        if self.sync is not None and not self.sync.is_closed:
            self.sync.close()
        super().teardown()

    # -- checkpoints ------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """The folder first: a file that has the mark has its folder. Weights alone need none."""
        if "optimizer_states" in checkpoint and save_into(self.sync, _beside(filepath)):
            checkpoint[_MARK] = True
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """The file first, for the same reason."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        self._loading = _beside(os.path.realpath(checkpoint_path))  # `last.ckpt` may be a link
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """One rank's on all of them, and then each its own."""
        super().load_optimizer_state_dict(checkpoint)
        if self.sync is not None:
            load_from(self.sync, self._loading, promised=_MARK in checkpoint)


def _beside(file: str | os.PathLike[str]) -> str:
    return f"{os.fspath(file)}.gradsieve"
