"""Accelerate: call `attach` after `accelerator.prepare`.

    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    sync = gradsieve.frameworks.accelerate.attach(accelerator, model, optimizer)      # the one new line

`accelerator.save_state` and `load_state` then keep every rank's state, in a folder `gradsieve` within.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from gradsieve import attaching
from gradsieve.errors import ConfigError
from gradsieve.frameworks.sidecar import FOLDER, load_from, save_into
from gradsieve.optimizers import as_list
from gradsieve.parallel.ddp import DdpSync
from gradsieve.ranks_alike import digest


def attach(accelerator: Accelerator, model: Any, optimizer: Any, **settings: Any) -> DdpSync:
    """Attach as `gradsieve.attach` does, with its settings, and keep state in the accelerator's checkpoints.

    `model` and `optimizer` are what `prepare` gave; several optimizers as a list. Call it before the first
    backward. To go on from a checkpoint, call `load_state` after it.
    """
    optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    unprepared = [each for each in optimizers if each not in accelerator._optimizers]
    if unprepared:
        raise ConfigError(
            f"rank {accelerator.process_index}: {type(unprepared[0]).__name__} was not prepared by this "
            "accelerator, so that it would not save it: give attach() what accelerator.prepare() returned"
        )
    sync: DdpSync = attaching.attach(model, optimizers, **settings)
    _Checkpoints(accelerator, sync, as_list(optimizers))
    return sync


class _Checkpoints:
    """Hook into `save_state` and `load_state` while the sync is open.

    Accelerate has no hook after loading. It loads rank 0's optimizers on all ranks after the model, so every
    rank's state is loaded when the last optimizer has been.
    """

    def __init__(self, accelerator: Accelerator, sync: DdpSync, optimizers: list[Any]) -> None:
        self._optimizers = optimizers
        self._sync = weakref.ref(sync)  # the model holds it; the accelerator, which has our hooks, need not
        self._folder: Path | None = None  # to load from, while `load_state` runs
        self._models: list[nn.Module] = []
        self._missing: set[int] = set()  # numbers of the optimizers that it has yet to load
        accelerator.register_save_state_pre_hook(self._before_saving)
        accelerator.register_load_state_pre_hook(self._before_loading)
        for place, each in enumerate(optimizers):
            each.register_load_state_dict_post_hook(lambda _, place=place: self._after_loading(place))

    def _before_saving(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        """Save before Accelerate writes its files: a save that breaks off here leaves none of them."""
        save_into(self._sync(), Path(folder) / FOLDER, _pair(models))

    def _before_loading(self, models: list[nn.Module], folder: str) -> None:
        sync = self._sync()
        if sync is not None and not sync.is_closed:
            self._folder, self._models = Path(folder) / FOLDER, models
            self._missing = set(range(len(self._optimizers)))

    def _after_loading(self, place: int) -> None:
        self._missing.discard(place)
        sync = self._sync()
        if self._folder is not None and not self._missing and sync is not None:
            folder, self._folder = self._folder, None  # loading ours loads the optimizers again
            load_from(sync, folder, False, _pair(self._models))


def _pair(models: list[nn.Module]) -> str:
    """Return a hash of the models: Accelerate's files have no place for another identity."""
    tensors = [each for model in models for each in model.state_dict().values() if isinstance(each, Tensor)]
    return f"{int(digest(tensors)) % (1 << 64):016x}"
