"""Which of the two models the user's parameters hold: the one all ranks share, or this rank's own.

A rank's own model is in place from a training forward to the step of the optimizer that follows it, and at
no other time: whoever looks at the parameters in between (an evaluation, `state_dict()`, `torch.save`,
`copy.deepcopy`, an averaged model) sees the shared model, the same bits on every rank, without asking anyone.

Changing over moves no element: a parameter's `.data` is pointed to the other model's memory. Autograd would
not notice, and run a backward on the wrong values; so the version counters of parameters are raised where a
step ends, as the optimizer's own writing raises them. A look in the middle of a step puts everything back
and raises none.

What the user writes to a parameter between steps is written to the shared model. It has to be the same on
all ranks, as in plain DDP; the rank's own model follows when it is next folded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from gradsieve.errors import ConfigError
from gradsieve.feedback.units import flat_view, shaped_like
from gradsieve.sync import StepPipeline
from gradsieve.torch_names import version_of


class TwoModels:
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
        self._showing_shared: dict[str, int] = {}
        """Parameters that hold the shared model, and their version when they began to."""

    @property
    def shows_own(self) -> bool:
        """Whether any parameter holds this rank's own model."""
        return len(self._showing_shared) < len(self._parameters)

    def show_own(self, names: Iterable[str] | None = None) -> None:
        for name in list(self._showing_shared) if names is None else names:
            version = self._showing_shared.pop(name, None)
            if version is not None:
                self._note_writing(name, version)
                self.point(name, self._own[name])

    def show_shared(self, names: Iterable[str] | None = None, *, raise_version: bool = True) -> None:
        changed = []
        for name in self._parameters if names is None else names:
            if name not in self._showing_shared:
                parameter = self._parameters[name]
                self._keep_replaced(name, parameter)
                self.point(name, self._shared[name])
                changed.append(self._held[name])
                self._showing_shared[name] = version_of(self._held[name]) + raise_version
        if raise_version:
            torch.autograd.graph.increment_version(changed)

    def look(self) -> Set[str]:
        """Show the shared model for a moment; give what this returns to `show_own` after it."""
        before = self._parameters.keys() - self._showing_shared.keys()
        self.show_shared(before, raise_version=False)
        return before

    def raise_versions(self) -> None:
        """Parameters were written, whichever model they hold: no graph from before may be run backward."""
        torch.autograd.graph.increment_version(self._held.values())
        for name in self._showing_shared:
            self._showing_shared[name] += 1

    def renew(self) -> None:
        """Both models were loaded. What was written to parameters before went with what they held, also where
        a distributed checkpoint wrote it there."""
        torch.autograd.graph.increment_version(self._held.values())
        for name in self._parameters:
            if name in self._showing_shared:
                self.point(name, self._shared[name])
                self._showing_shared[name] = version_of(self._held[name])
            else:
                self.point(name, self._own[name])

    def end(self) -> None:
        """The shared model, in the memory that the parameters had before."""
        self.show_shared()
        for name in self._parameters:
            self.point(name, self._own[name].copy_(self._shared[name]))
        self._showing_shared = {}

    def point(self, name: str, memory: Tensor) -> None:
        """The parameter is there from now on."""
        self._parameters[name].data = memory

    def _note_writing(self, name: str, version: int) -> None:
        parameter, shared = self._parameters[name], self._shared[name]
        replaced = parameter.data_ptr() != shared.data_ptr()
        if replaced or version_of(self._held[name]) != version:
            _check_place(name, parameter, shared)
            self._pipeline.write_shared(name, flat_view(parameter.detach()))

    def _keep_replaced(self, name: str, parameter: Tensor) -> None:
        """`parameter.data = ...` in user's code: a rank's own step, like writing in place."""
        own = self._own[name]
        if parameter.data_ptr() != own.data_ptr():
            _check_place(name, parameter, own)
            own.copy_(parameter.detach())


def _apart(part: Tensor) -> Tensor:
    """The same memory as a storage of its own. All parameters are parts of one long vector; savers take
    tensors in one storage for tied ones and keep one of them (Accelerate), or write all of it for each."""
    return part if part.numel() == 0 else from_dlpack(part.detach())


def _check_place(name: str, parameter: Tensor, expected: Tensor) -> None:
    here = parameter.device, parameter.dtype, parameter.shape, parameter.stride()
    there = expected.device, expected.dtype, expected.shape, expected.stride()
    if here != there:
        raise ConfigError(
            f"parameter {name!r} was moved, cast or shaped anew after attach() (now {parameter.dtype} "
            f"{tuple(parameter.shape)} on {parameter.device}): do it before, or close() and attach again"
        )
