"""What gradsieve leaves in a model: hooks that lead to a sync for as long as one is attached.

DDP takes one communication hook, for good. So the hook's state refers to a sync, to which gradients go.
Without a sync they are averaged as DDP does it, and another sync can be attached later. A copy of the model
(`copy.deepcopy`, pickle) gets a hook without a sync.
"""

# No `from __future__ import annotations` here: DDP checks that the hook's annotations are types, not strings.

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradsieve import torch_names
from gradsieve.errors import ConfigError


class Averaging(Protocol):
    """Whoever DDP hands its buckets to."""

    @property
    def hook(self) -> Callable[[GradBucket], torch.futures.Future[torch.Tensor]]: ...


class Behind(Protocol):
    """What a sync does at each of a model's hooks."""

    def before_forward(self, module: torch.nn.Module) -> None: ...

    def after_forward(self, module: torch.nn.Module, output: Any) -> None: ...

    def before_state(self, module: torch.nn.Module) -> None: ...

    def after_state(self, module: torch.nn.Module) -> None: ...

    def before_loading(self, module: torch.nn.Module) -> None: ...

    def after_loading(self, module: torch.nn.Module) -> None: ...


class CommHook:
    def __init__(self) -> None:
        self.sync: Averaging | None = None
        self.is_hung = False
        """Whether DDP's reducer has it: that of a copied model has no hook."""
        self.group: dist.ProcessGroup | None = None
        self.before_averaging: Callable[[], None] | None = None
        """What a sync that was closed left to be done before DDP averages again; on all ranks, once."""

    def catch_up(self) -> None:
        todo, self.before_averaging = self.before_averaging, None
        if todo is not None:
            todo()

    def __reduce__(self) -> tuple[type["CommHook"], tuple[()]]:
        return CommHook, ()


class ModuleHook:
    """One of torch's hooks on a module, as an object: it can be copied with the module, and leads nowhere
    then."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self.call = call

    def __reduce__(self) -> tuple[type["ModuleHook"], tuple[()]]:
        return type(self), ()

    @torch_names.never_compiled
    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        if self.call is not None:
            self.call(module)


class OutputHook(ModuleHook):
    @torch_names.never_compiled
    def __call__(self, module: torch.nn.Module, *inputs_and_output: Any) -> None:
        if self.call is not None:
            self.call(module, inputs_and_output[-1])


def hook_of(ddp: DistributedDataParallel) -> CommHook | None:
    """The one that an earlier attach() left, or None; another communication hook is refused."""
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


def install_hook(ddp: DistributedDataParallel, sync: Averaging) -> CommHook:
    """Lead DDP's hook to `sync`."""
    comm_hook = hook_of(ddp) or install_comm_hook(ddp)
    comm_hook.sync = sync
    return comm_hook


def register_hooks(root: Any, sync: Behind, first: bool) -> list[RemovableHandle]:
    """Lead a model's own hooks to `sync`; `first`: before a forward, ahead of the hooks that are there."""
    return [
        root.register_forward_pre_hook(ModuleHook(sync.before_forward), prepend=first),
        root.register_forward_hook(OutputHook(sync.after_forward), always_call=True),
        root.register_state_dict_pre_hook(ModuleHook(sync.before_state)),
        root.register_state_dict_post_hook(ModuleHook(sync.after_state)),
        root.register_load_state_dict_pre_hook(ModuleHook(sync.before_loading)),
        root.register_load_state_dict_post_hook(ModuleHook(sync.after_loading)),
    ]


def through(comm_hook: CommHook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    if comm_hook.sync is None:
        comm_hook.catch_up()
        return allreduce_hook(comm_hook.group, bucket)  # type: ignore[arg-type]  # None is the default group
    return comm_hook.sync.hook(bucket)
