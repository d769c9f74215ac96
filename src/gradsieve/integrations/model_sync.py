"""A sync that a model's own hooks lead to: which of the two models is in place when, and when to exchange.

One exchange belongs to each backward that averages gradients, or to every `every`-th of them: these are as
many on every rank, also where a rank skips steps of its optimizer. It begins with the forward before, or
with that backward at the latest. Nothing is written to parameters between a forward and its backward. With
`late=False` the exchange ends before that forward begins, and not at the end of the step before: a rank that
skips its step would be waited for there, perhaps for ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Set
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from gradsieve.feedback.digest import digest
from gradsieve.integrations.door import watch
from gradsieve.integrations.gradient_sync import GradientSync
from gradsieve.presets import Preset
from gradsieve.schemes.base import Scheme
from gradsieve.sync import StepPipeline


class Settings(TypedDict, total=False):
    """Of every sync that is attached to a model."""

    scheme: str | Scheme[Any] | None
    density: float | None
    bits: float | None
    every: int
    preset: Preset
    scaler: torch.amp.GradScaler | None
    dense_if_faster: bool


class ModelSync(GradientSync):
    """A GradientSync that nobody has to call: `reduce()` is the model's forward and backward."""

    hears_first: ClassVar[bool] = False
    """Whether it has to know of a forward before the hooks that the model has already."""

    def __init__(
        self, root: nn.Module, parameters: Iterable[tuple[str, Tensor]], optimizer: Any, **settings: Any
    ) -> None:
        # Weak: the model's hooks hold this sync, and the collector cannot see through all of them.
        self._root = weakref.ref(root)
        self._begun = False
        """Whether the exchange that belongs to the coming backward is under way."""
        self._trains_in_evaluation_mode = False
        self._looks: list[Set[str]] = []
        """Parameters to be put back after each forward in evaluation mode that is going on."""
        self._saving: Set[str] = frozenset()
        self._before_load = 0
        super().__init__(parameters, optimizer, **settings)

    def enter(self) -> None:
        """Also to the model."""
        root = self._root()
        assert root is not None
        self._hooks = watch(root, self, self.hears_first)
        super().enter()
        if self.models is not None:
            self.models.show_shared()

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().leave()

    # -- what the model's hooks lead to -----------------------------------------------------------------

    def before_forward(self, module: torch.nn.Module) -> None:
        """Training: what the optimizer moved is known, so exchange it while forward and backward compute, on
        this rank's own model. Evaluation: the shared model, for as long as the forward takes."""
        if self.models is None:
            return
        trains = torch.is_grad_enabled() and (module.training or self._trains_in_evaluation_mode)
        if not module.training and not trains:
            self.take_over_if_ripe()  # a rank that skipped its step has not done so yet
            self._looks.append(self.models.look())
        elif trains:
            self.models.show_own()
            if not self._begun:
                self.before_exchange()
                self.start_if_due()
                self._begun = True
                if not self.treatment.late:
                    self.take_over(self.parameters.keys())
                    self.models.raise_versions()

    def after_forward(self, module: torch.nn.Module) -> None:
        if self._looks and self.models is not None:
            self.models.show_own(self._looks.pop())

    def before_saving(self, module: torch.nn.Module) -> None:
        if self.models is not None:
            self.take_over_if_ripe()
            self._saving = self.models.look()

    def after_saving(self, module: torch.nn.Module) -> None:
        if self.models is not None:
            self.models.show_own(self._saving)
            self._saving = frozenset()

    def before_loading(self, module: torch.nn.Module) -> None:
        if self.models is not None:
            self.take_over()
            self.models.show_shared()
            self._before_load = self._fingerprint()

    def after_loading(self, module: torch.nn.Module) -> None:
        """Another model was loaded: what waited belonged to the one before."""
        if self.models is not None and self._fingerprint() != self._before_load:
            self.drop_what_waits()

    def drop_what_waits(self) -> None:
        """All ranks go on from the shared model as it is."""
        if isinstance(self.pipeline, StepPipeline) and self.models is not None:
            self.models.show_own()  # notes what was written
            self.pipeline.adopt(self.parameters.keys())
            self.pipeline.loads += 1
            self.models.show_shared()

    def _fingerprint(self) -> int:
        return int(digest([parameter.detach() for parameter in self.parameters.values()]))

    def after_update(self, names: Set[str]) -> None:
        super().after_update(names)
        if self.models is not None:
            self._looks.clear()
            self.models.show_shared(names)

    # -- what averaging gradients leads to --------------------------------------------------------------

    def belongs_to_a_backward(self) -> None:
        """The exchange that was begun, or one begun now: a model in evaluation mode is trained, or only parts
        of one were called."""
        if not self._begun:
            self.before_exchange()
            self.start_if_due()
            root = self._root()
            self._trains_in_evaluation_mode = root is not None and not root.training
        self._begun = False

    def before_exchange(self) -> None:
        """Raise where there can be none."""
