"""Every name of torch that is not public and that gradsieve uses all the same: here and nowhere else.

Each is one entry, with what breaks without it, and one function that is all others call. Nothing is looked up
at import. Where a torch has no such name, the feature that needs it refuses with a ConfigError that says so;
the others work. `gradsieve doctor` lists what the installed torch lacks, and tests/unit/test_torch_names.py
fails where a name vanished or means something else. All were seen in torch 2.13 and 2.15.
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
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsieve.errors import ConfigError

Called = TypeVar("Called", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Private:
    """One name, or several that are of no use without each other."""

    owner: str  # module, or module:class; for what only objects have, the file of torch that sets it
    names: tuple[str, ...]
    without: str  # what breaks where there is no such name

    def __str__(self) -> str:
        return f"{self.owner}: {', '.join(self.names)}"

    @property
    def is_there(self) -> bool:
        if self.owner.endswith(".py"):
            file = Path(torch.__file__).parent / self.owner
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
            return all(name in text for name in self.names)
        module, *inner = self.owner.split(":")
        try:
            owner = importlib.import_module(module)
            for name in inner:
                owner = getattr(owner, name)
        except (ImportError, AttributeError):
            return False
        return all(hasattr(owner, name) for name in self.names)

    @property
    def lost(self) -> str:
        """In words, for a message."""
        return f"torch {torch.__version__} has no {self}: {self.without}"


# The store over which ranks find out who failed.
STORE = Private("torch.distributed.distributed_c10d", ("_get_default_store",), "no sync can be attached")
# The deadline that the user gave a process group.
TIMEOUT = Private(
    "torch.distributed:ProcessGroup", ("_get_backend", "_device_types"), "no sync can be attached"
)
COMM_HOOKS = Private(
    "nn/parallel/distributed.py",
    ("_comm_hooks",),
    "another communication hook is not seen, so attach() to DistributedDataParallel is refused",
)
JOIN = Private(
    "nn/parallel/distributed.py",
    ("_join_config",),
    "join() around a training is not noticed: it loses other ranks' residuals",
)
PYTHON_REDUCER = Private(
    "nn/parallel/distributed.py",
    ("_use_python_reducer",),
    "with optimize_ddp='python_reducer' nothing is exchanged, and nobody says so",
)
COMPILED_FROM = Private(
    "_dynamo/eval_frame.py", ("_orig_mod",), "a compiled model is refused: attach() before torch.compile"
)
NO_COMPILING = Private(
    "torch._compile",
    ("_disable_dynamo",),
    "hooks are kept from torch.compile by its public name, which takes a second or two longer to load",
)
VERSION = Private(
    "torch:Tensor",
    ("_version",),
    "writes to parameters between steps are not seen, so no sync that exchanges steps can be attached",
)
STORAGE_USES = Private(
    "torch._C",
    ("_storage_Use_Count",),
    "exchanges are applied when a backward has ended, and not while it runs",
)
AFTER_GRADIENT = Private(
    "torch:Tensor",
    ("_post_accumulate_grad_hooks",),
    "the doctor does not see an optimizer in backward",
)
GRAPH_TASK = Private(
    "torch._C",
    ("_current_graph_task_id",),
    "a forward that a checkpoint repeats within backward looks like a new one: "
    "attach(replicate=...) with activation checkpointing is refused",
)
BACKWARD = Private(
    "torch.autograd:Variable",
    ("_execution_engine",),
    "no sync that exchanges steps can be attached",
)
FOREACH = Private(
    "torch",
    ("_foreach_copy_", "_foreach_lerp_", "_foreach_mul_", "_foreach_norm"),
    "steps that are not this rank's alone cannot be lengthened, and DEFT has no norms",
)
# The memory of a shard, the same object each time: `to_local` makes another.
LOCAL = Private("torch.distributed.tensor:DTensor", ("_local_tensor",), "attach(replicate=...) is refused")
SHARDS = Private(
    "torch.distributed.fsdp:FSDPModule", ("_get_fsdp_state",), "attach(replicate=...) is refused"
)
# By these shards say that they were averaged.
SHARD_PARTS = Private(
    "distributed/fsdp/_fully_shard/_fsdp_param_group.py",
    ("_all_reduce_hook", "all_reduce_grads", "fsdp_params", "offload_policy"),
    "attach(replicate=...) is refused",
)
# By these FSDP is pointed to the model that is shown.
SHARD_FLAT = Private(
    "distributed/fsdp/_fully_shard/_fsdp_param.py",
    ("_sharded_param_data", "sharded_param"),
    "attach(replicate=...) is refused",
)

PRIVATE = tuple(each for each in vars().copy().values() if isinstance(each, Private))

# A module that torch loads at the first optimizer or hook, in seconds: what forks ranks loads it once. Where
# there is none, nothing is lost but time.
LOADED_BEFORE_RANKS = "torch._dynamo"


def lacking() -> list[Private]:
    """What the installed torch does not have."""
    return [each for each in PRIVATE if not each.is_there]


def _get(private: Private, owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise ConfigError(private.lost) from error


# -- process groups ------------------------------------------------------------------------------------------


def default_store() -> dist.Store:
    """The store of the default group's rendezvous."""
    store: dist.Store = _get(STORE, dist.distributed_c10d, STORE.names[0])()
    return store


def connected_once_more(store: dist.Store) -> dist.Store:
    """`store.clone()`, which is there from torch 2.8 on: who waits on the one does not hold up the other.

    Before, another connection to the same server, under a name that all ranks agree on. Stores that are no
    server's hold nobody up."""
    if hasattr(store, "clone"):
        cloned: dist.Store = store.clone()
        return cloned
    server = server_of(store)
    if server is None:
        return store
    name = store.compare_set("gradsieve/connected-once-more", "", uuid.uuid4().hex).decode()
    own = dist.TCPStore(server.host, server.port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(f"gradsieve/{name}", own)


def server_of(store: dist.Store) -> dist.TCPStore | None:
    """The connection to a server behind a store and its prefixes, if there is one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def connected_to(server: dist.TCPStore, seconds: float) -> dist.TCPStore:
    """A connection to the same server, without prefixes, made within so many seconds. Raises what every
    failed request raises. Where nobody listens c10d tries again for up to three times as long as it is given,
    and cannot be interrupted, so that another socket looks first."""
    try:
        socket.create_connection((server.host, server.port), seconds).close()
    except OSError as error:
        raise RuntimeError(f"the store at {server.host}:{server.port}: {error}") from error
    patience = timedelta(seconds=seconds)
    return dist.TCPStore(server.host, server.port, is_master=False, wait_for_workers=False, timeout=patience)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """What the user set for their group."""
    devices = _get(TIMEOUT, group, "_device_types")
    options = _get(TIMEOUT, _get(TIMEOUT, group, "_get_backend")(devices[0]), "options")
    timeout: timedelta = _get(TIMEOUT, options, "_timeout")
    return timeout


def all_gather_flat(gathered: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> None:
    """`all_gather_into_tensor`, by the name that it has from torch 2.13 on where there is one."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, own, group=group)


# -- DistributedDataParallel ---------------------------------------------------------------------------------


def comm_hooks_of(ddp: nn.parallel.DistributedDataParallel) -> list[tuple[Any, Any]]:
    """DDP's own list of hooks and their states."""
    hooks: list[tuple[Any, Any]] = _get(COMM_HOOKS, ddp, "_comm_hooks")
    return hooks


def is_joining(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Inside `join()`, and after it: DDP does not take it back."""
    config = getattr(ddp, "_join_config", None)
    return config is not None and bool(config.enable)


def hands_over_no_buckets(ddp: nn.parallel.DistributedDataParallel) -> bool:
    return bool(getattr(ddp, "_use_python_reducer", False))


# -- modules and tensors -------------------------------------------------------------------------------------


def without_compile(model: Any) -> Any:
    """What `torch.compile` was given, or the model itself."""
    while isinstance(model, nn.Module) and "_orig_mod" in (inside := dict(model.named_children())):
        model = inside["_orig_mod"]
    return model


def never_compiled(call: Called) -> Called:
    """A decorator, as torch's own optimizers use: `torch.compiler.disable` loads the compiler at once."""
    disable = getattr(importlib.import_module("torch._compile"), "_disable_dynamo", torch.compiler.disable)
    wrapped: Called = disable(call)
    return wrapped


def uncompiled() -> AbstractContextManager[Any]:
    """Within it nothing is compiled: optimizers that compile their step, as torchao's do, would take a minute
    for a made-up parameter. Who never loaded the compiler has none of these, and is spared loading it."""
    is_loaded = LOADED_BEFORE_RANKS in sys.modules
    return torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()


def version_of(tensor: Tensor) -> int:
    """Raised by every writing in place, also through views."""
    version: int = _get(VERSION, tensor, "_version")
    return version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """The same of many, in little time."""
    try:
        return [each._version for each in tensors]
    except AttributeError as error:
        raise ConfigError(VERSION.lost) from error


def uses_of(tensor: Tensor) -> float:
    """How many tensors share its memory: views, and what graphs saved, among them. Where nobody knows, nan,
    which equals nothing."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return float("nan") if count is None else count(tensor.untyped_storage()._cdata)


def is_in_backward() -> bool:
    return running_pass() != -1


def acts_on_gradient(parameter: Tensor) -> bool:
    """Whether a hook runs as soon as its gradient was accumulated."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def running_pass() -> int:
    """Number of the backward pass that this thread is in; -1: none."""
    task: int = _get(GRAPH_TASK, torch._C, "_current_graph_task_id")()
    return task


def after_backward(call: Callable[[], None]) -> None:
    """Call it when the backward pass that this thread is in has ended; never, if that breaks off."""
    engine = _get(BACKWARD, torch.autograd.Variable, "_execution_engine")
    # Queued anew at the end: DDP ends its own part there, and could not go on where `call` raised before it.
    engine.queue_callback(lambda: engine.queue_callback(call))


def calls_hooks(optimizer: Any) -> bool:
    """Whether torch calls hooks around its steps: it wraps them where `super().__init__()` was called."""
    step = getattr(type(optimizer), "step", None)
    return isinstance(optimizer, torch.optim.Optimizer) and bool(getattr(step, "hooked", False))


def step_without_hooks(optimizer: Any) -> None:
    """`optimizer.step()`, of which no hook hears."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # torch wraps it when the first of its kind is made
        step = step.__wrapped__
    step(optimizer)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target: one call for an optimizer's group, here and below."""
    _get(FOREACH, torch, "_foreach_copy_")(list(targets), list(sources))


def scale_all(targets: Sequence[Tensor], factor: float) -> None:
    _get(FOREACH, torch, "_foreach_mul_")(list(targets), factor)


def lerp_all(targets: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """target += weight * (end - target)"""
    _get(FOREACH, torch, "_foreach_lerp_")(list(targets), list(ends), weight)


def norms_of(parts: Sequence[Tensor]) -> list[Tensor]:
    """Euclidean, one a part."""
    return list(_get(FOREACH, torch, "_foreach_norm")(parts))


def local_of(sharded: Any) -> Tensor:
    """A DTensor's own memory: the same object at each call."""
    local: Tensor = _get(LOCAL, sharded, "_local_tensor")
    return local


def plain_part_of(tensor: Tensor) -> Tensor:
    """What of it lies on this rank."""
    return local_of(tensor) if hasattr(tensor, "_local_tensor") else tensor


# -- fully_shard ---------------------------------------------------------------------------------------------


def shard_groups_of(module: Any) -> list[Any]:
    """FSDP's groups of parameters of one module: a list from torch 2.13 on, one or none before."""
    state = _get(SHARDS, module, "_get_fsdp_state")()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = _get(SHARDS, state, "_fsdp_param_group")
    return [] if group is None else [group]


def shard_flats_of(group: Any) -> dict[nn.Parameter, Tensor]:
    """What FSDP gathers each of a group's parameters from."""
    each_of = _get(SHARD_PARTS, group, "fsdp_params")
    return {
        _get(SHARD_FLAT, each, "sharded_param"): _get(SHARD_FLAT, each, "_sharded_param_data")
        for each in each_of
    }


def averaging_hook_of(group: Any) -> Callable[[Tensor], None] | None:
    """What FSDP calls when it has averaged a group's gradients among shards."""
    hook: Callable[[Tensor], None] | None = _get(SHARD_PARTS, group, "_all_reduce_hook")
    return hook


def set_averaging_hook(group: Any, heard: Callable[[], None] | None) -> None:
    """`FSDPModule.set_all_reduce_hook` for one group; not called in passes that only accumulate."""
    averaging_hook_of(group)  # refuses where FSDP knows none: setting it would do nothing

    def hook(_: Tensor) -> None:
        if group.all_reduce_grads:
            heard()  # type: ignore[misc]

    group._all_reduce_hook = None if heard is None else hook
