"""Lightning: a strategy instead of "ddp".

    trainer = lightning.Trainer(strategy=gradsieve.frameworks.lightning.GradsieveStrategy())

Lightning tells a strategy, but no callback, on all ranks which file is saved, loaded and removed. Every
rank's state goes to a folder next to that file, `NAME.ckpt.gradsieve`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from gradsieve.attaching import attach
from gradsieve.frameworks.sidecar import finish, load_from, new_pair, save_into
from gradsieve.parallel.ddp import DdpSync

# Key of pair and step in a checkpoint with a sidecar folder. A checkpoint without it is of plain DDP, or of
# the end of a training.
_MARK = "gradsieve"


class GradsieveStrategy(DDPStrategy):
    """Exchange as `gradsieve.attach` does behind DDP; takes the settings of both, by name."""

    def __init__(self, **settings: Any) -> None:
        ours = attach.__kwdefaults__ or {}
        super().__init__(**{name: value for name, value in settings.items() if name not in ours})
        self._settings = {name: value for name, value in settings.items() if name in ours}
        self.sync: DdpSync | None = None
        self._loading: str = ""
        self._broke_off = False

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self._broke_off = False
        if trainer.state.fn == TrainerFn.FITTING:
            self.sync = attach(self.model, self.optimizers, **self._settings)

    def on_train_end(self) -> None:
        """Flush the residual into the model, which is then a plain one to test, save or train further."""
        super().on_train_end()
        self._finish()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._broke_off = True

    def teardown(self) -> None:
        """Close without asking other ranks if the training broke off, perhaps on this rank alone. Flush first
        if it was resumed at its end: Lightning then calls no `on_train_end`."""
        if not self._broke_off:
            self._finish()
        if self.sync is not None and not self.sync.is_closed:
            self.sync.close()
        super().teardown()

    def _finish(self) -> None:
        if self.sync is not None and not self.sync.is_closed:
            self.sync.flush()
            self.sync.close()

    # -- checkpoints ------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write the folder first, so that a file that names a folder has it. Weights alone need none."""
        folder, pair = _sidecar_of(filepath), new_pair()
        is_paired = "optimizer_states" in checkpoint and save_into(self.sync, folder, pair)
        if is_paired:
            checkpoint[_MARK] = {"pair": pair, "step": checkpoint["global_step"]}
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if is_paired and self.sync is not None:
            finish(self.sync, folder)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove the file first, so that a file that names a folder has it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_sidecar_of(filepath), ignore_errors=True)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        self._loading = _sidecar_of(os.path.realpath(checkpoint_path))  # `last.ckpt` may be a link
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load each rank's own state after Lightning has loaded one rank's on all ranks."""
        super().load_optimizer_state_dict(checkpoint)
        if self.sync is not None:
            mark = checkpoint.get(_MARK, {})
            load_from(self.sync, self._loading, bool(mark), str(mark.get("pair", "")))


def _sidecar_of(file: str | os.PathLike[str]) -> str:
    return f"{os.fspath(file)}.gradsieve"
