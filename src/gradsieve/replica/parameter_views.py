"""Which of the two models the user's parameters hold: the one all ranks share, or this rank's own.

A rank's own model is in place while the model's training forward, a backward pass or the step of an optimizer
is running, and at no other time: whoever looks at the parameters between these (an evaluation, a moving
average, `state_dict()`, `copy.deepcopy`, a hook after the step) sees the shared model, the same bits on every
rank, without asking anyone.

Changing over moves no element: a parameter's `.data` is pointed to the other model's memory. What a forward
saved for its backward is found there again when that runs. The version counters of parameters are raised
where a step ends, as the optimizer's own writing raises them, so that autograd refuses a graph from before.
Casts that autocast keeps are of the model that was in place: they are dropped with it.

What the user writes to a parameter between steps is written to the shared model. It has to be the same on
all ranks, as in plain DDP; the rank's own model follows when it is next rebased.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from gradsieve.errors import ConfigError
from gradsieve.feedback.units import flat_view, shaped_like, strides_that_count
from gradsieve.pipeline import StepPipeline
from gradsieve.torch_names import uses_of, version_of, versions_of


class SingleModel:
    """Where gradients are exchanged: the parameters hold the only model there is, and nothing is switched."""

    @property
    def shows_own(self) -> bool:
        """Whether any parameter holds this rank's own model."""
        return False

    @property
    def may_write_shared(self) -> bool:
        return False

    def show_own(self, names: Iterable[str] | None = None) -> Set[str]:
        """Of these parameters or of all; returns those that showed the shared model."""
        return frozenset()

    def show_shared(self, names: Iterable[str] | None = None, *, raise_version: bool = True) -> None:
        """`raise_version`: what they held was written, so that no graph from before may be run backward."""

    def look(self) -> Set[str]:
        """Show the shared model for a moment; give what this returns to `show_own` after it."""
        return frozenset()

    def raise_versions(self) -> None:
        """Parameters were written, whichever model they hold: no graph from before may be run backward."""

    def renew(self) -> None:
        """Both models were loaded. What was written to parameters before went with what they held, also where
        a distributed checkpoint wrote it there."""

    def end(self) -> None:
        """The shared model, in the memory that the parameters had before."""


class ParameterViews(SingleModel):
    """Where steps are exchanged: parameters hold the shared model or this rank's own."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        pipeline: StepPipeline,
        held: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`held` is what the user writes to, where that is not the parameters themselves: it has the version
        counters."""
        self._parameters, self._pipeline = parameters, pipeline
        self._held = held or parameters
        self._own = {name: parameter.data for name, parameter in parameters.items()}
        shown = pipeline.shown()
        self._shared = {
            name: _apart(shaped_like(shown[name], parameter)) for name, parameter in parameters.items()
        }
        self._own_at = {name: own.data_ptr() for name, own in self._own.items()}
        self._shared_at = {name: shared.data_ptr() for name, shared in self._shared.items()}
        """Where these lie: a parameter that lies elsewhere was replaced."""
        self._showing_shared: dict[str, int] = {}
        """Parameters that hold the shared model, and their version when they began to."""
        # Who else reads w's memory, such as a graph of parts of the model that were called at rest.
        self._uses = {name: uses_of(shared) for name, shared in self._shared.items() if shared.numel()}

    @property
    def may_write_shared(self) -> bool:
        """Whether nobody would see w change: no parameter holds it, and no graph or view of the user's."""
        if self._showing_shared:
            return False
        return all(uses_of(self._shared[name]) == uses for name, uses in self._uses.items())

    @property
    def shows_own(self) -> bool:
        return len(self._showing_shared) < len(self._parameters)

    def show_own(self, names: Iterable[str] | None = None) -> Set[str]:
        shown = self._showing_shared
        changed = list(shown) if names is None else [name for name in names if name in shown]
        if not changed:
            return frozenset()
        versions = versions_of([self._held[name] for name in changed])
        for name, version in zip(changed, versions, strict=True):
            is_replaced = self._parameters[name].data_ptr() != self._shared_at[name]
            if shown.pop(name) != version or is_replaced:
                self._note_writing(name)
            self.point(name, self._own[name])
        torch.clear_autocast_cache()
        return frozenset(changed)

    def show_shared(self, names: Iterable[str] | None = None, *, raise_version: bool = True) -> None:
        shown = self._showing_shared
        changed = [name for name in (self._parameters if names is None else names) if name not in shown]
        if not changed:
            return
        held = [self._held[name] for name in changed]
        for name, version in zip(changed, versions_of(held), strict=True):
            if self._parameters[name].data_ptr() != self._own_at[name]:
                self._keep_replaced(name)
            self.point(name, self._shared[name])
            shown[name] = version + raise_version
        torch.clear_autocast_cache()
        if raise_version:
            torch.autograd.graph.increment_version(held)

    def look(self) -> Set[str]:
        before = self._parameters.keys() - self._showing_shared.keys()
        self.show_shared(before, raise_version=False)
        return before

    def raise_versions(self) -> None:
        torch.autograd.graph.increment_version(self._held.values())
        for name in self._showing_shared:
            self._showing_shared[name] += 1

    def renew(self) -> None:
        torch.autograd.graph.increment_version(self._held.values())
        for name in self._parameters:
            if name in self._showing_shared:
                self.point(name, self._shared[name])
                self._showing_shared[name] = version_of(self._held[name])
            else:
                self.point(name, self._own[name])

    def end(self) -> None:
        self.show_shared()
        for name in self._parameters:
            self.point(name, self._own[name].copy_(self._shared[name]))
        self._showing_shared = {}

    def point(self, name: str, memory: Tensor) -> None:
        """The parameter is there from now on."""
        self._parameters[name].data = memory

    def _note_writing(self, name: str) -> None:
        parameter = self._parameters[name]
        _check_place(name, parameter, self._shared[name])
        self._pipeline.write_shared(name, flat_view(parameter.detach()))

    def _keep_replaced(self, name: str) -> None:
        """`parameter.data = ...` in user's code: a rank's own step, like writing in place."""
        parameter, own = self._parameters[name], self._own[name]
        _check_place(name, parameter, own)
        own.copy_(parameter.detach())


def _apart(part: Tensor) -> Tensor:
    """The same memory as a storage of its own. All parameters are parts of one long vector; savers take
    tensors in one storage for tied ones and keep one of them (Accelerate), or write all of it for each."""
    # Not from the tensor itself: its `__dlpack_device__` refuses every device from outside of torch.
    return part if part.numel() == 0 else from_dlpack(to_dlpack(part.detach()))


def _check_place(name: str, parameter: Tensor, expected: Tensor) -> None:
    here = parameter.device, parameter.dtype, parameter.shape, strides_that_count(parameter)
    there = expected.device, expected.dtype, expected.shape, strides_that_count(expected)
    if here != there:
        raise ConfigError(
            f"parameter {name!r} was moved, cast or reshaped after attach() (now {parameter.dtype} "
            f"{tuple(parameter.shape)} on {parameter.device}): do it before, or close() and attach again"
        )
