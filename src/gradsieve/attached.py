"""Which of two models the user's parameters hold, by what torch's hooks say of forwards, backwards and steps.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import is_dataclass
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradsieve import torch_names
from gradsieve.errors import ConfigError
from gradsieve.hooks import OptimizerHooks
from gradsieve.ranks_alike import digest
from gradsieve.replica import Replica
from gradsieve.runner import Runner


class Phase(Enum):
    RESTING = auto()
    FORWARD = auto()
    BACKWARD = auto()  # of a pass that has averaged gradients
    STEPPING = auto()


class Handle(Protocol):
    def remove(self) -> None: ...


class Graph:
    """What a training forward recorded, until the backward that averages its gradients has ended."""

    __slots__ = ("__weakref__", "attached", "is_reached")

    def __init__(self, attached: Attached) -> None:
        self.is_reached = False
        self.attached = weakref.ref(attached)

    @torch_names.never_compiled
    def __call__(self, _: Tensor) -> None:
        """A gradient reached an output of the forward."""
        attached = self.attached()
        if attached is not None:
            attached.reach(self)


class Attached:
    """The listener of a sync's hooks. Without a model's hooks it hears of optimizers only, and the parameters
    hold x throughout."""

    def __init__(self, runner: Runner, register: Callable[[Attached], Iterable[Handle]] | None) -> None:
        """`register` registers the hooks of a model and yields what removes them."""
        self.runner, self.models = runner, runner.pipeline.models
        self._register = register
        # Whether the two models take turns.
        self.switches = register is not None and runner.pipeline.exchanges_steps
        self.phase = Phase.RESTING if self.switches else Phase.FORWARD
        # Weak: a graph whose outputs are gone gets no backward any more.
        self._graphs: list[weakref.ref[Graph]] = []
        self._stepping: Set[str] = frozenset()
        self._stepped_in = Phase.RESTING  # an optimizer may step inside a backward
        # The pass whose end is watched for, and whether it began at rest, through a graph that is retained.
        self._pass: int | None = None
        self._is_second = False
        # For each forward that is running: parameters to which x is put back after it; None: it trains.
        self._forwards: list[Set[str] | None] = []
        self._before_load = 0
        self._handles: list[Handle] = []
        self.is_listening = False
        self.optimizer_hooks = OptimizerHooks(runner.replica.held, self, runner.replica.optimizers)

    def enter(self) -> None:
        """Begin to listen."""
        self.is_listening = True
        self.optimizer_hooks.register()
        self._handles.append(self.optimizer_hooks)
        for handle in () if self._register is None else self._register(self):
            self._handles.append(handle)
        if self.switches:
            self.models.show_shared()

    def leave(self) -> None:
        """Listen no more. The parameters hold this rank's own model."""
        self.is_listening = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.switches:
            self.phase, self._graphs, self._stepping = Phase.RESTING, [], frozenset()
            self._pass, self._is_second = None, False
        self.models.show_own()

    # -- forwards -----------------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, *_: Any) -> None:
        self.recover()
        if not (module.training and torch.is_grad_enabled()):
            if module.training:
                self._forwards.append(frozenset())
            else:
                self.look(module)
            return
        self._forwards.append(None)
        if self.phase is Phase.BACKWARD:
            return
        if self.phase is Phase.RESTING:
            self.runner.refresh()
        self.models.show_own()
        self.phase = Phase.FORWARD

    def look(self, module: nn.Module, *_: Any) -> None:
        """Show w during an evaluation forward or state_dict()."""
        self.runner.before_reading()
        self._forwards.append(self.models.look())

    def after_forward(self, module: nn.Module, *arguments: Any) -> None:
        """End what `before_forward` or `look` began."""
        if not self._forwards:
            return
        put_back = self._forwards.pop()
        if put_back is not None:
            self.models.show_own(put_back)
        elif self.phase is Phase.FORWARD and not torch_names.is_in_backward():
            graph = Graph(self)
            self._graphs.append(weakref.ref(graph))
            for tensor in _tensors_in(arguments[-1]):
                if tensor.requires_grad:
                    tensor.register_hook(graph)  # type: ignore[no-untyped-call]

    # -- backwards ----------------------------------------------------------------------------------------

    def reach(self, graph: Graph) -> None:
        """A gradient reached an output of this graph's forward."""
        if not self.is_listening:
            return
        if self.phase is Phase.RESTING:  # through a graph that was retained: x is still what it was
            self.models.show_own()
            self.phase, self._is_second = Phase.FORWARD, True
        graph.is_reached = True
        running = torch_names.running_pass()
        if running != self._pass:  # the first output of this pass, or of one after a pass that broke off
            self._pass = running
            torch_names.after_backward(self.backward_ended)

    def averaged(self) -> None:
        """All ranks average gradients, so that all take part in an exchange."""
        if self.phase is Phase.BACKWARD:
            return
        runner = self.runner
        if runner.pipeline.begins_exchange():
            runner.begin()
        if runner.pending is not None and runner.pipeline.is_exchange_due and self.models.may_write_shared:
            runner.apply_meanwhile()
        self.phase = Phase.BACKWARD
        if self._pass is None:  # a loss of intermediate values reached no output
            self._pass = torch_names.running_pass()
            torch_names.after_backward(self.backward_ended)

    def backward_ended(self) -> None:
        has_averaged, self._pass = self.phase is Phase.BACKWARD, None
        if not (has_averaged or self._is_second):
            return
        self._is_second = False
        try:
            if has_averaged:
                self.runner.complete_if_due()
        finally:
            alive = [(graph, graph()) for graph in self._graphs]
            self._graphs = [graph for graph, there in alive if there is not None and not there.is_reached]
            if self._graphs:
                self.phase = Phase.FORWARD
            else:
                self.models.show_shared(raise_version=False)
                self.phase = Phase.RESTING

    def recover(self, call: str | None = None) -> None:
        """End a pass or a step that raised: neither says that it has ended. In a backward, refuse `call`."""
        if self.phase is Phase.BACKWARD and not torch_names.is_in_backward():
            self.backward_ended()
        elif self.phase is Phase.STEPPING:
            self.end_step(self._stepping)
        if call is not None and self.phase is Phase.BACKWARD:
            raise ConfigError(
                f"{self.runner.replica.where}: {call} inside a backward pass, in which models are exchanged: "
                "call it after loss.backward()"
            )

    # -- steps --------------------------------------------------------------------------------------------

    def before_update(self, names: Set[str], optimizer: Any) -> None:
        if self.phase is Phase.BACKWARD and not torch_names.is_in_backward():
            self.backward_ended()
        if self.switches:
            if self.phase is not Phase.STEPPING:
                self._stepped_in, self.phase = self.phase, Phase.STEPPING
            self._stepping |= names
        self.models.show_own(names)
        self.runner.before_update(names, optimizer)

    def after_update(self, names: Set[str]) -> None:
        self.runner.after_update(names)
        if self.switches:
            self.end_step(names)

    def end_step(self, names: Set[str]) -> None:
        self._stepping -= names
        self.models.show_shared(names)
        if names >= self.runner.pipeline.parameters.keys():
            self._graphs = []  # versions were raised: autograd refuses graphs from before
        if not self._stepping:
            at_rest = Phase.FORWARD if self._graphs else Phase.RESTING
            self.phase = Phase.BACKWARD if self._stepped_in is Phase.BACKWARD else at_rest

    # -- another model ------------------------------------------------------------------------------------

    def before_loading(self, module: nn.Module, *_: Any) -> None:
        self.recover("load_state_dict()")
        self.models.show_shared()
        self.phase, self._graphs = Phase.RESTING, []
        self._before_load = _fingerprint(self.runner.replica)

    def after_loading(self, module: nn.Module, *_: Any) -> None:
        """Drop the residual, which belonged to the model before, unless the same one was loaded."""
        replica, parameters = self.runner.replica, self.runner.pipeline.parameters
        if _fingerprint(replica) == self._before_load:
            return
        if self.runner.pending is not None:
            loaded = {name: each.detach().clone() for name, each in parameters.items()}
            self.runner.complete()  # of steps of the model before
            with torch.no_grad():
                for name, each in loaded.items():
                    parameters[name].copy_(each)
        drop_residual(replica)


def drop_residual(replica: Replica) -> None:
    """Go on from the shared model as the parameters hold it, on all ranks."""
    if replica.pipeline.exchanges_steps:
        replica.models.show_own()  # notes what was written
        replica.pipeline.reset_to_shared()
        replica.models.show_shared()


def _fingerprint(replica: Replica) -> int:
    return int(digest([parameter.detach() for parameter in replica.parameters.values()]))


def _tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors that a forward returned, where DDP looks for them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors_in(tuple(output.values()))
    elif isinstance(output, list | tuple | set):
        for each in output:
            yield from _tensors_in(each)
    elif is_dataclass(output):
        yield from _tensors_in(tuple(vars(output).values()))
