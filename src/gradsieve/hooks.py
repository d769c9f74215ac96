"""torch's hooks, on modules, on DistributedDataParallel and on optimizers, which lead to a sync while it
listens.

A copy of a model (`copy.deepcopy`, pickle) gets hooks that lead nowhere. DDP takes one communication hook,
for good: without a sync it averages gradients as DDP does, and another sync can use it later."""

# No `from __future__ import annotations` here: DDP checks that the hook's annotations are types, not strings.

import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradsieve import torch_names
from gradsieve.errors import ConfigError
from gradsieve.optimizers import MANY_CLOSURES

# -- modules ------------------------------------------------------------------------------------------------


class ModuleListener(Protocol):
    def before_forward(self, module: nn.Module, *_: Any) -> None: ...
    def after_forward(self, module: nn.Module, *arguments: Any) -> None: ...
    def look(self, module: nn.Module, *_: Any) -> None: ...
    def before_loading(self, module: nn.Module, *_: Any) -> None: ...
    def after_loading(self, module: nn.Module, *_: Any) -> None: ...


class ModuleHook:
    """A hook as an object, so that it can be copied with the module."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self.call = call

    def __reduce__(self) -> tuple[type["ModuleHook"], tuple[()]]:
        return type(self), ()

    @torch_names.never_compiled
    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        if self.call is not None:
            self.call(module, *arguments)


def register_hooks(root: Any, listener: ModuleListener, first: bool) -> list[RemovableHandle]:
    """Call `listener` around forwards, state_dict() and load_state_dict() of a model. With `first` it hears
    of a forward before the model's other hooks."""
    return [
        root.register_forward_pre_hook(ModuleHook(listener.before_forward), prepend=first),
        root.register_forward_hook(ModuleHook(listener.after_forward), always_call=True),
        root.register_state_dict_pre_hook(ModuleHook(listener.look)),
        root.register_state_dict_post_hook(ModuleHook(listener.after_forward)),
        root.register_load_state_dict_pre_hook(ModuleHook(listener.before_loading)),
        root.register_load_state_dict_post_hook(ModuleHook(listener.after_loading)),
    ]


# -- DistributedDataParallel --------------------------------------------------------------------------------


HandOver = Callable[[GradBucket], torch.futures.Future[Tensor]]


class CommHook:
    """The state of DDP's communication hook."""

    def __init__(self) -> None:
        self.hand_over: HandOver | None = None  # what a sync does with buckets
        self.is_hung = False  # whether DDP's reducer has it: that of a copied model has no hook
        self.group: dist.ProcessGroup | None = None
        # What a sync that was closed left to be done before DDP averages again; on all ranks, once.
        self.before_averaging: Callable[[], None] | None = None

    def remove(self) -> None:
        """Let DDP average gradients again."""
        self.hand_over = None

    def catch_up(self) -> None:
        todo, self.before_averaging = self.before_averaging, None
        if todo is not None:
            todo()

    def __reduce__(self) -> tuple[type["CommHook"], tuple[()]]:
        return CommHook, ()


def hook_of(ddp: DistributedDataParallel) -> CommHook | None:
    """Return the hook that an earlier attach() left; a communication hook of the user's is refused."""
    for _, state in torch_names.comm_hooks_of(ddp):
        if isinstance(state, CommHook):
            return state if state.is_hung else None
        raise ConfigError(
            "this DistributedDataParallel has a communication hook already, and takes only one: make another "
            "and attach() to that"
        )
    return None


def install_comm_hook(ddp: DistributedDataParallel) -> CommHook:
    comm_hook = CommHook()
    comm_hook.group = ddp.process_group
    torch_names.comm_hooks_of(ddp).clear()  # a copied model's
    ddp.register_comm_hook(comm_hook, through)
    comm_hook.is_hung = True
    return comm_hook


def through(comm_hook: CommHook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    if comm_hook.hand_over is None:
        comm_hook.catch_up()
        return allreduce_hook(comm_hook.group, bucket)  # type: ignore[arg-type]  # None is the default group
    return comm_hook.hand_over(bucket)


def own_gradients(ddp: DistributedDataParallel, averaged: Callable[[], None]) -> HandOver:
    """Leave a rank its own gradient, for its own optimizer. `averaged` is called once a backward."""
    here = weakref.ref(ddp)  # DDP's reducer holds the hook's state, and the collector cannot see through it

    def hand_over(bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            _refuse_joining(here())
            averaged()
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return hand_over


def _refuse_joining(ddp: DistributedDataParallel | None) -> None:
    if ddp is None or torch_names.is_joining(ddp):
        raise ConfigError(
            "join() ends by giving all ranks the model of one, which loses the others' residuals: use "
            "attach(..., exchange=gradsieve.Gradients())"
        )


# -- optimizers ---------------------------------------------------------------------------------------------


class StepListener(Protocol):
    def before_update(self, names: Set[str], optimizer: Any) -> None: ...
    def after_update(self, names: Set[str]) -> None: ...


class OptimizerHooks:
    """Call a listener around each step of an optimizer that has any of these parameters, also of one that
    was made after `attach` or is called by a framework.

    Before a step means: just before parameters are written. For `step(closure)` that is after the closure,
    which computes the gradient. After it: before the user's own hooks of the optimizer see what was
    written."""

    def __init__(
        self, parameters: Mapping[str, Tensor], listener: StepListener, given: Sequence[Any] = ()
    ) -> None:
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.listener = weakref.ref(listener)
        self._known: weakref.WeakKeyDictionary[Any, tuple[list[int], Set[str]]] = weakref.WeakKeyDictionary()
        self._after: weakref.WeakKeyDictionary[Any, RemovableHandle] = weakref.WeakKeyDictionary()
        self._before: RemovableHandle | None = None
        for optimizer in given:
            self.names_in(optimizer)

    def register(self) -> None:
        this = weakref.ref(self)  # torch keeps global hooks for as long as Python runs

        @torch_names.never_compiled
        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            hooks = this()
            return None if hooks is None else hooks.before(optimizer, args, kwargs)

        @torch_names.never_compiled
        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            hooks = this()
            listener = None if hooks is None else hooks.listener()
            if hooks is not None and listener is not None and (names := hooks.names_in(optimizer)):
                listener.after_update(names)

        self.after, self._before = after, register_optimizer_step_pre_hook(before)

    def remove(self) -> None:
        handles, self._before = [self._before, *self._after.values()], None
        self._after.clear()
        for handle in handles:
            if handle is not None:
                handle.remove()

    def known(self) -> list[Any]:
        """Return the given optimizers, and others that have stepped these parameters, in the order of their
        first steps."""
        return [optimizer for optimizer, (_, names) in self._known.items() if names]

    def names_in(self, optimizer: Any) -> Set[str]:
        """Return which of these parameters the optimizer has now: groups can be added and changed."""
        ids = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        known = self._known.get(optimizer)
        if known is None or known[0] != ids:
            known = ids, frozenset(self.names[each] for each in ids if each in self.names)
            self._known[optimizer] = known
        return known[1]

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        listener, names = self.listener(), self.names_in(optimizer)
        if listener is None or not names:
            return None
        self.come_first(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            listener.before_update(names, optimizer)
            return None
        both = followed_by(
            closure, lambda: listener.before_update(names, optimizer), type(optimizer).__name__
        )
        if "closure" in kwargs:
            return args, {**kwargs, "closure": both}
        return (args[0], both, *args[2:]), kwargs

    def come_first(self, optimizer: Optimizer) -> None:
        """Be called before other hooks after the step: torch's global hooks come last."""
        if optimizer not in self._after:
            self._after[optimizer] = optimizer.register_step_post_hook(self.after)
        handle = self._after[optimizer]
        hooks = handle.hooks_dict_ref()
        if hooks is not None and next(iter(hooks), handle.id) != handle.id:
            hooks.move_to_end(handle.id, last=False)


def followed_by(closure: Callable[[], Any], then: Callable[[], None], name: str) -> Callable[[], Any]:
    calls = 0

    def both() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ConfigError(f"{name} {MANY_CLOSURES}")
        result = closure()
        with torch.no_grad():
            then()
        return result

    return both
