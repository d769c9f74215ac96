"""A sync that a model's own hooks lead to: which of the two models is in place when, and when to exchange.

One exchange belongs to each backward that averages gradients, or to every `every`-th of them: these are as
many on every rank, also where a rank skips steps of its optimizer. It begins with the forward before,
tentatively, since a forward may be one rank's alone, and is completed when that backward ends: from then on
all ranks show the same shared model again, whoever steps and whoever does not. With `overlap=0` the exchange
ends before that forward begins.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Sequence, Set
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradsieve.feedback.digest import digest
from gradsieve.parallel import backward
from gradsieve.parallel.hooks import register_hooks
from gradsieve.pipeline import StepPipeline
from gradsieve.pipeline.exchange_settings import Exchange
from gradsieve.schemes.base import Scheme
from gradsieve.sync.gradient_sync import GradientSync


class Settings(TypedDict, total=False):
    """Of every sync that is attached to a model."""

    scheme: str | Scheme[Any] | None
    density: float | None
    bits: float | None
    exchange: Exchange | None
    scaler: torch.amp.GradScaler | None
    deterministic: bool


class ModelSync(GradientSync):
    """A GradientSync that nobody has to call: `reduce()` is the model's forward and backward."""

    hears_first: ClassVar[bool] = False
    """Whether it has to know of a forward before the hooks that the model has already."""
    _hooks: Sequence[RemovableHandle] = ()

    def __init__(
        self, root: nn.Module, parameters: Iterable[tuple[str, Tensor]], optimizer: Any, **settings: Any
    ) -> None:
        # Weak: the model's hooks hold this sync, and the collector cannot see through all of them.
        self._root = weakref.ref(root)
        self._begun = False
        """Whether the exchange that belongs to the coming backward has begun."""
        self._belongs = False
        """Whether the backward that is running averages gradients."""
        self._forwards: list[tuple[bool, Set[str]]] = []
        """Of each forward that is running: whether it trains, and which parameters to put back after it."""
        self.graph_of: int | None = None
        """Thread of the last forward that was recorded for a backward."""
        self._graph_is_own = self._graph_is_due = False
        """Whether that, or one before it that still waits for its backward, was on this rank's own model; and
        whether one waits."""
        self._graphs = 0
        """Training forwards of which a graph may be left that remembers this rank's own model."""
        self._in_backward: Set[str] = frozenset()
        self._stepping: Set[str] = frozenset()
        """Parameters that an optimizer is writing, or was when it raised."""
        self._trained_in_evaluation_mode = self._trains_in_evaluation_mode = False
        """Whether the last backward was of such a forward; and whether an optimizer then stepped by it."""
        self._before_load = self._before_exchange = 0
        """Fingerprints of the model that a load found: as it was, and as the user had seen it before an
        exchange was completed for the load."""
        self._completed: dict[str, Tensor] = {}
        """The model with that exchange, while somebody loads."""
        super().__init__(parameters, optimizer, **settings)

    def enter(self) -> None:
        """Also to the model, and to backward passes."""
        root = self._root()
        assert root is not None
        self._hooks = register_hooks(root, self, self.hears_first)
        super().enter()
        if self.exchanges_steps:
            backward.listen(self)
            self.replica.views.show_shared()

    def leave(self) -> None:
        backward.leave(self)
        for hook in self._hooks:
            hook.remove()
        super().leave()

    # -- what the model's hooks lead to -----------------------------------------------------------------

    def before_forward(self, module: torch.nn.Module) -> None:
        """Training: this rank's own model; what the optimizer moved is known, so exchange it while forward
        and backward compute. Evaluation: the shared model, also inside of a backward."""
        if not self.exchanges_steps:
            return
        views = self.replica.views
        if self._stepping:  # that step raised
            views.show_shared(self._stepping)
            self._stepping = frozenset()
        if module.training:
            self._trains_in_evaluation_mode = False
        records = torch.is_grad_enabled()
        trains = records and (module.training or self._trains_in_evaluation_mode)
        if records:
            self.graph_of = threading.get_ident()
            self._graph_is_own = trains or (self._graph_is_own and self._graph_is_due)
        if trains:
            self._graph_is_due = True
            self._graphs += 1
            self._forwards.append((True, views.show_own()))
            self._begin()
        elif module.training:
            self._forwards.append((False, frozenset()))
        else:
            self.before_looking()
            self._forwards.append((False, views.look()))

    def after_forward(self, module: torch.nn.Module) -> None:
        if self._forwards:
            trained, changed = self._forwards.pop()
            if trained:
                self.replica.views.show_shared(changed, raise_version=False)
            else:
                self.replica.views.show_own(changed)

    def _begin(self) -> None:
        if self._begun or not self.pipeline.is_last_of_period:
            return
        self.before_exchange()
        self._begun = True
        self.start_exchange(tentative=True)
        if not self.replica.settings.overlap:
            self.complete(self.parameters.keys())
            self.replica.views.raise_versions()

    def before_loading(self, module: torch.nn.Module) -> None:
        if not self.exchanges_steps:
            return
        if self.has_begun_tentatively:
            self.forget_exchange()
        self.replica.views.show_shared()
        self._before_load = self._before_exchange = self._fingerprint()
        if self._pending is not None:
            self.complete()
            self.replica.views.show_shared()
            self._before_load = self._fingerprint()
            self._completed = {name: each.detach().clone() for name, each in self.parameters.items()}

    def after_loading(self, module: torch.nn.Module) -> None:
        """Another model was loaded: the residual belonged to the one before. Who loads what the model just
        gave, while an exchange was pending, loads the same one."""
        if not self.exchanges_steps:
            return
        completed, self._completed = self._completed, {}
        loaded = self._fingerprint()
        if completed and loaded == self._before_exchange:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(completed[name])
        elif loaded != self._before_load:
            self.drop_residual()

    def drop_residual(self) -> None:
        """All ranks go on from the shared model as it is."""
        if isinstance(self.pipeline, StepPipeline):
            self.replica.views.show_own()  # notes what was written
            self.pipeline.adopt(self.parameters.keys())
            self.pipeline.loads += 1
            self.replica.views.show_shared()

    def _fingerprint(self) -> int:
        return int(digest([parameter.detach() for parameter in self.parameters.values()]))

    # -- what a backward pass leads to ------------------------------------------------------------------

    def begin_backward(self) -> None:
        self._in_backward = self.replica.views.show_own() if self._graph_is_own else frozenset()

    def end_backward(self, completed: bool, frees_graph: bool) -> None:
        """Completes the exchange. Where no graph is left that this rank's own model could be read for,
        that is written too, in the same pass over memory; otherwise with the optimizer's step."""
        belongs, self._belongs = self._belongs, False
        try:
            if belongs:
                self._graph_is_due = False
                was_last = frees_graph and self._graphs == 1
                self._graphs -= was_last
                with contextlib.nullcontext() if completed else contextlib.suppress(Exception):
                    self.complete_if_due(self.parameters.keys() if was_last else frozenset())
        finally:
            changed, self._in_backward = self._in_backward, frozenset()
            self.replica.views.show_shared(changed, raise_version=False)

    def belongs_to_a_backward(self) -> None:
        """The exchange that was begun, or one begun now: a model in evaluation mode is trained, or only parts
        of one were called. All ranks average gradients, so that all take part."""
        begun, self._begun = self._begun, False
        if self._pending is not None:
            self._pending.is_tentative = False
        if self.pipeline.begins_exchange() and not begun:
            self.before_exchange()
            self.start_exchange()
        self._belongs = True
        if self.pipeline.is_exchange_due and self.replica.views.may_write_shared:
            self.apply_meanwhile()
        root = self._root()
        self._trained_in_evaluation_mode = root is not None and not root.training

    def writable_at_rest(self) -> Set[str]:
        """All, unless a graph is left that this rank's own model could be read for."""
        return frozenset() if self._graphs else self.parameters.keys()

    def before_exchange(self) -> None:
        """Raise where there can be none."""

    def forget_exchange(self) -> None:
        super().forget_exchange()
        self._begun = False

    # -- what an optimizer's step leads to --------------------------------------------------------------

    def before_update(self, names: Set[str], optimizer: Any) -> None:
        self._trains_in_evaluation_mode = self._trained_in_evaluation_mode
        self._stepping |= names
        super().before_update(names, optimizer)

    def after_update(self, names: Set[str]) -> None:
        super().after_update(names)
        self._stepping -= names
        self.replica.views.show_shared(names)
        if self.exchanges_steps and names >= self.parameters.keys():
            self._graphs = 0  # autograd refuses graphs from before: versions were raised
