"""Every name of torch that is not public and that gradsieve uses all the same: here and nowhere else.

`PRIVATE` lists each name with what breaks without it. Nothing is looked up at import: if a torch lacks a
name, the feature that needs it refuses with a ConfigError that says so, and the others work. `gradsieve
doctor` lists what the installed torch lacks. All names were seen in torch 2.13 and 2.15.
"""

from __future__ import annotations

import importlib
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsieve.errors import ConfigError

Called = TypeVar("Called", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Private:
    name: str
    owner: str  # module, or module:class; for what only objects have, the file of torch that sets it
    without: str  # what breaks without the name

    @property
    def lost(self) -> str:
        return f"torch {torch.__version__} has no {self.owner}: {self.name}: {self.without}"


_NO_SYNC = "no sync can be attached"
_NO_STEPS = "no sync that exchanges steps can be attached"
_NO_SHARDS = "attach(replicate=...) is refused"
_NO_LENGTH = "the length of steps cannot be corrected"
_DDP = "nn/parallel/distributed.py"
_SHARD_GROUP = "distributed/fsdp/_fully_shard/_fsdp_param_group.py"
_SHARD = "distributed/fsdp/_fully_shard/_fsdp_param.py"

PRIVATE = (
    Private("_get_default_store", "torch.distributed.distributed_c10d", _NO_SYNC),
    Private("_get_backend", "torch.distributed:ProcessGroup", _NO_SYNC),
    Private("_device_types", "torch.distributed:ProcessGroup", _NO_SYNC),
    Private("_comm_hooks", _DDP, "attach() to DDP is refused: other communication hooks are not seen"),
    Private("_join_config", _DDP, "join() around a training is not noticed, and loses others' residuals"),
    Private("_use_python_reducer", _DDP, "with optimize_ddp='python_reducer' nothing is exchanged, silently"),
    Private("_orig_mod", "_dynamo/eval_frame.py", "a compiled model is refused: attach() before compiling"),
    Private("_disable_dynamo", "torch._compile", "attach() loads the compiler, for some seconds"),
    Private("_version", "torch:Tensor", _NO_STEPS),
    Private("_storage_Use_Count", "torch._C", "exchanges are applied only after a backward"),
    Private("_post_accumulate_grad_hooks", "torch:Tensor", "no doctor sees an optimizer in backward"),
    Private("_current_graph_task_id", "torch._C", "activation checkpointing with replicate= is refused"),
    Private("_execution_engine", "torch.autograd:Variable", _NO_STEPS),
    Private("_foreach_copy_", "torch", _NO_LENGTH),
    Private("_foreach_lerp_", "torch", _NO_LENGTH),
    Private("_foreach_mul_", "torch", _NO_LENGTH),
    Private("_foreach_norm", "torch", "DEFT has no norms of layers"),
    # The memory of a shard, the same object each time: `to_local` makes another.
    Private("_local_tensor", "torch.distributed.tensor:DTensor", _NO_SHARDS),
    Private("_get_fsdp_state", "torch.distributed.fsdp:FSDPModule", _NO_SHARDS),
    # FSDP calls the hook when gradients were averaged, also in passes without `all_reduce_grads`.
    Private("_all_reduce_hook", _SHARD_GROUP, _NO_SHARDS),
    Private("all_reduce_grads", _SHARD_GROUP, _NO_SHARDS),
    Private("fsdp_params", _SHARD_GROUP, _NO_SHARDS),
    Private("_sharded_param_data", _SHARD, _NO_SHARDS),
    Private("sharded_param", _SHARD, _NO_SHARDS),
)
_BY_NAME = {private.name: private for private in PRIVATE}

# A module that torch loads at the first optimizer or hook, in seconds: a program that forks ranks loads it
# once.
LOADED_BEFORE_RANKS = "torch._dynamo"


def _get(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise ConfigError(_BY_NAME[name].lost) from error


# -- process groups ------------------------------------------------------------------------------------------


def default_store() -> dist.Store:
    store: dist.Store = _get(dist.distributed_c10d, "_get_default_store")()
    return store


def connected_once_more(store: dist.Store) -> dist.Store:
    """Return another connection to the store, which waits on the first one do not hold up, under a name that
    all ranks agree on. A store without a server holds nothing up, and is returned itself."""
    server = server_of(store)
    if server is None:
        return store
    name = store.compare_set("gradsieve/connected-once-more", "", uuid.uuid4().hex).decode()
    own = dist.TCPStore(server.host, server.port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(f"gradsieve/{name}", own)


def server_of(store: dist.Store) -> dist.TCPStore | None:
    """Return the connection to a server behind a store and its prefixes, if there is one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def connected_to(server: dist.TCPStore, seconds: float) -> dist.TCPStore:
    """Connect to the same server within so many seconds, without prefixes; raise RuntimeError like every
    failed request. c10d tries a port on which no process listens for up to three times as long as it is
    given, and cannot be interrupted: therefore another socket looks first."""
    try:
        socket.create_connection((server.host, server.port), seconds).close()
    except OSError as error:
        raise RuntimeError(f"the store at {server.host}:{server.port}: {error}") from error
    patience = timedelta(seconds=seconds)
    return dist.TCPStore(server.host, server.port, is_master=False, wait_for_workers=False, timeout=patience)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the deadline that the user gave a process group."""
    device = _get(group, "_device_types")[0]
    timeout: timedelta = _get(group, "_get_backend")(device).options._timeout
    return timeout


def all_gather_flat(gathered: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> None:
    """Call `all_gather_single`, which torch before 2.13 calls `all_gather_into_tensor`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, own, group=group)


# -- DistributedDataParallel ---------------------------------------------------------------------------------


def comm_hooks_of(ddp: nn.parallel.DistributedDataParallel) -> list[tuple[Any, Any]]:
    hooks: list[tuple[Any, Any]] = _get(ddp, "_comm_hooks")
    return hooks


def is_joining(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Say whether `join()` was entered; DDP does not take it back afterwards."""
    config = getattr(ddp, "_join_config", None)
    return config is not None and bool(config.enable)


def hands_over_no_buckets(ddp: nn.parallel.DistributedDataParallel) -> bool:
    return bool(getattr(ddp, "_use_python_reducer", False))


# -- modules and tensors -------------------------------------------------------------------------------------


def without_compile(model: Any) -> Any:
    """Return what `torch.compile` was given, or the model itself."""
    while isinstance(model, nn.Module) and "_orig_mod" in (inside := dict(model.named_children())):
        model = inside["_orig_mod"]
    return model


def never_compiled(call: Called) -> Called:
    """Decorate as torch's own optimizers do: `torch.compiler.disable` loads the compiler at once."""
    disable = getattr(importlib.import_module("torch._compile"), "_disable_dynamo", torch.compiler.disable)
    wrapped: Called = disable(call)
    return wrapped


def uncompiled() -> AbstractContextManager[Any]:
    """Keep optimizers that compile their step, such as torchao's, from doing so: it would take a minute for
    a made-up parameter. If the compiler was never loaded there are none, and it is not loaded here."""
    is_loaded = LOADED_BEFORE_RANKS in sys.modules
    return torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()


def version_of(tensor: Tensor) -> int:
    """Return a number that every writing in place raises, also through views."""
    version: int = _get(tensor, "_version")
    return version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return `version_of` many tensors, in little time."""
    try:
        return [tensor._version for tensor in tensors]
    except AttributeError as error:
        raise ConfigError(_BY_NAME["_version"].lost) from error


def uses_of(tensor: Tensor) -> float:
    """Return how many tensors share its memory, among them views and what graphs saved; nan, which equals
    nothing, if torch does not say."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return float("nan") if count is None else count(tensor.untyped_storage()._cdata)


def is_in_backward() -> bool:
    return running_pass() != -1


def acts_on_gradient(parameter: Tensor) -> bool:
    """Say whether a hook runs as soon as its gradient was accumulated."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def running_pass() -> int:
    """Return the number of the backward pass that this thread is in; -1 outside of one."""
    task: int = _get(torch._C, "_current_graph_task_id")()
    return task


def after_backward(call: Callable[[], None]) -> None:
    """Call it when the backward pass that this thread is in has ended; never, if that breaks off."""
    engine = _get(torch.autograd.Variable, "_execution_engine")
    # Queued anew at the end: DDP ends its own part there, and could not go on where `call` raised before it.
    engine.queue_callback(lambda: engine.queue_callback(call))


def calls_hooks(optimizer: Any) -> bool:
    """Say whether torch calls hooks around its steps: it wraps them if `super().__init__()` was called."""
    step = getattr(type(optimizer), "step", None)
    return isinstance(optimizer, torch.optim.Optimizer) and bool(getattr(step, "hooked", False))


def step_without_hooks(optimizer: Any) -> None:
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # torch wraps it when the first of its kind is made
        step = step.__wrapped__
    step(optimizer)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target: one call for an optimizer's group, here and below."""
    _get(torch, "_foreach_copy_")(list(targets), list(sources))


def scale_all(targets: Sequence[Tensor], factor: float) -> None:
    _get(torch, "_foreach_mul_")(list(targets), factor)


def lerp_all(targets: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """target += weight * (end - target)"""
    _get(torch, "_foreach_lerp_")(list(targets), list(ends), weight)


def norms_of(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the Euclidean norm of each part."""
    return list(_get(torch, "_foreach_norm")(parts))


def plain_part_of(tensor: Tensor) -> Tensor:
    """Return what of the tensor lies on this rank: a DTensor's own memory, the same object at each call."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


# -- fully_shard ---------------------------------------------------------------------------------------------


def shard_groups_of(module: Any) -> list[Any]:
    """Return FSDP's groups of parameters of one module: a list from torch 2.13 on, one or none before."""
    state = _get(module, "_get_fsdp_state")()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def shard_flats_of(group: Any) -> dict[nn.Parameter, Tensor]:
    """Return the tensor that FSDP gathers each of a group's parameters from."""
    parameters = _get(group, "fsdp_params")
    return {_get(each, "sharded_param"): _get(each, "_sharded_param_data") for each in parameters}


def averaging_hook_of(group: Any) -> Callable[[Tensor], None] | None:
    """Return what FSDP calls when it has averaged a group's gradients among shards."""
    hook: Callable[[Tensor], None] | None = _get(group, "_all_reduce_hook")
    return hook


def set_averaging_hook(group: Any, averaged: Callable[[], None] | None) -> None:
    """Do what `FSDPModule.set_all_reduce_hook` does, for one group; passes that only accumulate do not call
    the hook."""
    averaging_hook_of(group)  # refuses where FSDP knows none: setting it would do nothing

    def hook(_: Tensor) -> None:
        if group.all_reduce_grads:
            averaged()  # type: ignore[misc]

    group._all_reduce_hook = None if averaged is None else hook
