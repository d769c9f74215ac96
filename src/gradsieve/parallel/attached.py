"""A sync that hears of a model's forwards, backwards and steps by torch's hooks.

Two models take turns in the user's parameters: w, which all ranks share, and x, this rank's own, which its
optimizer steps. What parameters hold follows from the phase:

    event                    RESTING: w          FORWARD: x         BACKWARD: x          STEPPING: x of some
    training forward begins  refresh, show x     show x             (computed again)     (the step raised)
                             -> FORWARD                                                  show w of these
    training forward ends    -                   its graph waits    -                    -
    evaluation forward       w is there          show w, then x     show w, then x       show w of these
    gradient reaches output  show x -> FORWARD   watch for the end  -                    -
    gradients are averaged   begin the exchange  begin an exchange  -                    -
                             -> BACKWARD         -> BACKWARD
    outermost pass ends      -                   -                  complete what is     -
                                                                    due; no graph waits:
                                                                    show w -> RESTING
    optimizer's pre-step     show and refresh x  the same           (the pass broke      more names
                             -> STEPPING                            off) end it; same
    optimizer's post-step    -                   -                  -                    show w of names
    state_dict()             w is there          show w, then x     show w, then x       show w, then x
    load_state_dict()        other bits: e = 0   show w, the same   refused              (the step raised)
    flush, save, load ...    complete, refresh   complete           refused              (the step raised)

One exchange belongs to each backward that averages gradients, or to every `every`-th of them: these are as
many on every rank, also where a rank skips steps of its optimizer. It begins with the first averaged
gradients and is completed when that backward ends. x is written by optimizers and just before them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import is_dataclass
from enum import Enum, auto
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradsieve import torch_names
from gradsieve.errors import ConfigError
from gradsieve.hooks import register_hooks
from gradsieve.ranks_alike import digest
from gradsieve.sync.gradient_sync import GradientSync


class Phase(Enum):
    RESTING = auto()
    FORWARD = auto()
    BACKWARD = auto()  # of a pass that has averaged gradients
    STEPPING = auto()


class Graph:
    """What a training forward recorded, until the backward that averages its gradients has ended."""

    __slots__ = ("__weakref__", "is_reached", "sync")

    def __init__(self, sync: Attached) -> None:
        self.is_reached = False
        self.sync = weakref.ref(sync)

    @torch_names.never_compiled
    def __call__(self, _: Tensor) -> None:
        """A gradient reached an output of the forward."""
        sync = self.sync()
        if sync is not None:
            sync.reach(self)


class Attached(GradientSync):
    """A GradientSync that nobody has to call: `reduce()` is the model's backward."""

    # Whether it has to hear of a forward before the hooks that the model has already.
    hears_first: ClassVar[bool] = False
    _hooks: Sequence[RemovableHandle] = ()

    def __init__(
        self, root: nn.Module, parameters: Iterable[tuple[str, Tensor]], optimizer: Any, **settings: Any
    ) -> None:
        # Weak: the model's hooks hold this sync, and the collector cannot see through all of them.
        self._root = weakref.ref(root)
        self.phase = Phase.RESTING
        # Weak: one whose outputs are gone gets no backward any more.
        self._graphs: list[weakref.ref[Graph]] = []
        self._stepping: Set[str] = frozenset()
        self._stepped_in = Phase.RESTING  # an optimizer may step inside a backward
        # The pass whose end is watched for, and whether it began at rest, through a graph that is retained.
        self._pass: int | None = None
        self._is_second = False
        # Of each forward that is running: parameters to which x is put back after it; None: it trains.
        self._forwards: list[Set[str] | None] = []
        self._before_load = 0
        super().__init__(parameters, optimizer, **settings)

    def enter(self) -> None:
        root = self._root()
        assert root is not None
        self._hooks = register_hooks(root, self, self.hears_first)
        super().enter()
        if self.exchanges_steps:
            self.replica.models.show_shared()

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._rest()
        super().leave()

    def _rest(self) -> None:
        self.phase, self._graphs, self._stepping = Phase.RESTING, [], frozenset()
        self._pass, self._is_second = None, False

    # -- forwards -----------------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module) -> None:
        if not self.exchanges_steps:
            return
        self._end_what_broke_off()
        if not (module.training and torch.is_grad_enabled()):
            self._forwards.append(frozenset() if module.training else self._look())
            return
        self._forwards.append(None)
        if self.phase is Phase.BACKWARD:
            return
        if self.phase is Phase.RESTING:
            self.refresh()
        self.replica.models.show_own()
        self.phase = Phase.FORWARD

    def after_forward(self, module: nn.Module, output: Any) -> None:
        if not self._forwards:
            return
        put_back = self._forwards.pop()
        if put_back is not None:
            self.replica.models.show_own(put_back)
        elif self.phase is Phase.FORWARD and not torch_names.is_in_backward():
            graph = Graph(self)
            self._graphs.append(weakref.ref(graph))
            for tensor in _tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(graph)  # type: ignore[no-untyped-call]

    def before_state(self, module: nn.Module) -> None:
        if self.exchanges_steps:
            self._forwards.append(self._look())

    def after_state(self, module: nn.Module) -> None:
        if self.exchanges_steps and self._forwards:
            self.replica.models.show_own(self._forwards.pop() or frozenset())

    def _look(self) -> Set[str]:
        """Show w; returns the parameters that held x."""
        self.before_looking()
        return self.replica.models.look()

    # -- backwards ----------------------------------------------------------------------------------------

    def reach(self, graph: Graph) -> None:
        if not self.exchanges_steps or not self.is_listening:
            return
        if self.phase is Phase.RESTING:  # through a graph that was retained: x is still what it was
            self.replica.models.show_own()
            self.phase, self._is_second = Phase.FORWARD, True
        graph.is_reached = True
        running = torch_names.running_pass()
        if running != self._pass:  # the first output of this pass, or of one after a pass that broke off
            self._watch(running)

    def averaged(self) -> None:
        """All ranks average gradients, so that all take part in an exchange."""
        if self.phase is Phase.BACKWARD:
            return
        if self.pipeline.begins_exchange():
            self.before_exchange()
            self.start_exchange()
        is_due = self._pending is not None and self.pipeline.is_exchange_due
        if is_due and self.replica.models.may_write_shared:
            self.apply_meanwhile()
        self.phase = Phase.BACKWARD
        if self._pass is None:  # a loss of intermediate values reached no output
            self._watch(torch_names.running_pass())

    def before_exchange(self) -> None:
        """Raise where there can be none."""

    def _watch(self, running: int) -> None:
        """Hear of the end of this pass, and not of those within it, in which checkpoints compute again."""
        self._pass = running
        torch_names.after_backward(self.backward_ended)

    def backward_ended(self) -> None:
        has_averaged, self._pass = self.phase is Phase.BACKWARD, None
        if not (has_averaged or self._is_second):
            return
        self._is_second = False
        try:
            if has_averaged:
                self.complete_if_due()
        finally:
            alive = [(graph, graph()) for graph in self._graphs]
            self._graphs = [graph for graph, there in alive if there is not None and not there.is_reached]
            if self._graphs:
                self.phase = Phase.FORWARD
            else:
                self.replica.models.show_shared(raise_version=False)
                self.phase = Phase.RESTING

    def _end_what_broke_off(self) -> None:
        """A pass that raised does not say that it has ended, and neither does a step."""
        if self.phase is Phase.BACKWARD and not torch_names.is_in_backward():
            self.backward_ended()
        elif self.phase is Phase.STEPPING:
            self._end_step(self._stepping)

    # -- steps --------------------------------------------------------------------------------------------

    def before_update(self, names: Set[str], optimizer: Any) -> None:
        if self.phase is Phase.BACKWARD and not torch_names.is_in_backward():
            self.backward_ended()
        if self.exchanges_steps:
            if self.phase is not Phase.STEPPING:
                self._stepped_in, self.phase = self.phase, Phase.STEPPING
            self._stepping |= names
        super().before_update(names, optimizer)

    def after_update(self, names: Set[str]) -> None:
        super().after_update(names)
        if self.exchanges_steps:
            self._end_step(names)

    def _end_step(self, names: Set[str]) -> None:
        self._stepping -= names
        self.replica.models.show_shared(names)
        if names >= self.parameters.keys():  # versions were raised: autograd refuses graphs from before
            self._graphs = []
        if not self._stepping:
            at_rest = Phase.FORWARD if self._graphs else Phase.RESTING
            self.phase = Phase.BACKWARD if self._stepped_in is Phase.BACKWARD else at_rest

    # -- calls --------------------------------------------------------------------------------------------

    def before_call(self, call: str) -> None:
        self._end_what_broke_off()
        if self.phase is Phase.BACKWARD:
            raise ConfigError(
                f"{self.replica.where}: {call} inside a backward pass, in which models are exchanged: call "
                "it after loss.backward()"
            )

    def writable_at_rest(self) -> Set[str]:
        """A graph that waits for its backward reads x."""
        return self.parameters.keys() if self.phase is Phase.RESTING else frozenset()

    def before_loading(self, module: nn.Module) -> None:
        if not self.exchanges_steps:
            return
        self.before_call("load_state_dict()")
        self.replica.models.show_shared()
        self._rest()
        self._before_load = self._fingerprint()

    def after_loading(self, module: nn.Module) -> None:
        """The residual belonged to the model before, unless the same one was loaded."""
        if not self.exchanges_steps or self._fingerprint() == self._before_load:
            return
        loaded = {name: each.detach().clone() for name, each in self.parameters.items() if self._pending}
        self.complete()  # of steps of the model before
        with torch.no_grad():
            for name, each in loaded.items():
                self.parameters[name].copy_(each)
        self.drop_residual()

    def drop_residual(self) -> None:
        """All ranks go on from the shared model as it is."""
        if self.exchanges_steps:
            self.replica.models.show_own()  # notes what was written
            self.pipeline.reset_to_shared()
            self.replica.models.show_shared()

    def _fingerprint(self) -> int:
        return int(digest([parameter.detach() for parameter in self.parameters.values()]))


def _tensors_in(output: Any) -> Iterator[Tensor]:
    """In what a forward returned, as DDP looks for them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors_in(tuple(output.values()))
    elif isinstance(output, list | tuple | set):
        for each in output:
            yield from _tensors_in(each)
    elif is_dataclass(output):
        yield from _tensors_in(tuple(vars(output).values()))
