"""Every name of torch that is not public and that gradsieve uses all the same: here and nowhere else.

Each is one entry, with what needs it and what is lost without it, and one function that is all others call.
Nothing is looked up at import. Where a torch has no such name, the feature that needs it refuses with a
ConfigError that says so; the others work. `gradsieve doctor` lists what the installed torch lacks, and
tests/unit/test_torch_names.py fails where a name vanished or means something else.

All were seen in torch 2.6, 2.13 and 2.15, but for those that `since` dates later.
"""

from __future__ import annotations

import importlib
import inspect
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

    owner: str
    """Module, or module:class, that has it; for what only objects have, the file of torch that sets it."""
    names: tuple[str, ...]
    use: str
    without: str
    since: tuple[int, int] = (2, 6)
    """The first torch that has it; 2.6 is the oldest that is looked at."""

    def __str__(self) -> str:
        return f"{self.owner}: {', '.join(self.names)}"

    @property
    def is_there(self) -> bool:
        if self.owner.endswith(".py"):
            file = Path(torch.__file__).parent / self.owner
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
            return all(name in text for name in self.names)
        try:
            owner = _find(self.owner)
        except (ImportError, AttributeError):
            return False
        return all(hasattr(owner, name) for name in self.names)

    @property
    def lost(self) -> str:
        """In words, for a message."""
        return f"torch {torch.__version__} has no {self}, for {self.use}: {self.without}"


def _find(dotted: str) -> Any:
    """A module, or what is reached from one by its attributes."""
    module, *inner = dotted.split(":")
    found: Any = importlib.import_module(module)
    for name in inner:
        found = getattr(found, name)
    return found


STORE = Private(
    "torch.distributed.distributed_c10d",
    ("_get_default_store",),
    "the store over which ranks find out who failed",
    "no sync can be attached",
)
TIMEOUT = Private(
    "torch.distributed:ProcessGroup",
    ("_get_backend", "_device_types"),
    "the deadline that the user gave a process group",
    "no sync can be attached",
)
COMM_HOOKS = Private(
    "nn/parallel/distributed.py",
    ("_comm_hooks",),
    "seeing another communication hook, and an earlier sync's",
    "attach() to DistributedDataParallel is refused",
)
JOIN = Private(
    "nn/parallel/distributed.py",
    ("_join_config",),
    "seeing join() around a training",
    "join() is not noticed: it loses other ranks' residuals",
)
PYTHON_REDUCER = Private(
    "nn/parallel/distributed.py",
    ("_use_python_reducer",),
    "seeing that DDP is set to hand over no buckets",
    "with optimize_ddp='python_reducer' nothing is exchanged, and nobody says so",
)
COMPILED_FROM = Private(
    "_dynamo/eval_frame.py",
    ("_orig_mod",),
    "taking off what torch.compile put around a model",
    "a compiled model is refused: attach() before torch.compile",
)
NO_COMPILING = Private(
    "torch._compile",
    ("_disable_dynamo",),
    "hooks that torch.compile leaves alone, without loading the compiler",
    "torch.compiler.disable is used, which takes a second or two longer to load",
)
VERSION = Private(
    "torch:Tensor",
    ("_version",),
    "seeing that somebody wrote into a parameter between steps",
    "no sync that exchanges steps can be attached",
)
STORAGE_USES = Private(
    "torch._C",
    ("_storage_Use_Count",),
    "seeing that no graph would read the shared model in a backward pass",
    "exchanges are applied when a backward has ended, and not while it runs",
)
AFTER_GRADIENT = Private(
    "torch:Tensor",
    ("_post_accumulate_grad_hooks",),
    "the doctor's look for an optimizer in backward",
    "the doctor does not see one",
)
GRAPH_TASK = Private(
    "torch._C",
    ("_current_graph_task_id",),
    "telling a forward that a checkpoint repeats within backward from a new one",
    "attach(replicate=...) with activation checkpointing is refused",
)
BACKWARD = Private(
    "torch.autograd",
    ("_engine_run_backward",),
    "knowing when a backward pass begins and ends",
    "no sync that exchanges steps can be attached",
)
FOREACH = Private(
    "torch",
    ("_foreach_copy_", "_foreach_lerp_", "_foreach_mul_"),
    "one call for the parameters of an optimizer's group",
    "one call a parameter, which is slower",
)
NORMS = Private(
    "torch",
    ("_foreach_norm",),
    "the norms of all layers in one call, for DEFT",
    "one call a layer, which is slower",
)
LOCAL = Private(
    "torch.distributed.tensor:DTensor",
    ("_local_tensor",),
    "the memory of a shard, the same object each time (`to_local` makes another)",
    "attach(replicate=...) is refused",
)
SHARDS = Private(
    "torch.distributed.fsdp:FSDPModule",
    ("_get_fsdp_state",),
    "the shards of a model that fully_shard() was applied to",
    "attach(replicate=...) is refused",
)
SHARD_PARTS = Private(
    "distributed/fsdp/_fully_shard/_fsdp_param_group.py",
    ("_all_reduce_hook", "all_reduce_grads", "fsdp_params", "offload_policy"),
    "hearing that shards were averaged",
    "attach(replicate=...) is refused",
    since=(2, 7),
)
SHARD_FLAT = Private(
    "distributed/fsdp/_fully_shard/_fsdp_param.py",
    ("_sharded_param_data", "sharded_param"),
    "pointing FSDP to the model that is shown",
    "attach(replicate=...) is refused",
)

PRIVATE = tuple(each for each in vars().copy().values() if isinstance(each, Private))

LOADED_BEFORE_RANKS = "torch._dynamo"
"""A module that torch loads at the first optimizer or hook, in seconds: what forks ranks loads it once. Where
there is none, nothing is lost but time."""


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


def buffers_stay() -> dict[str, Any]:
    """DDP's setting that lets each rank keep its buffers, by the name that it has from torch 2.13 on where
    there is one."""
    known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers"
    return {name if name in known else "broadcast_buffers": False}


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


def compiled_from(model: nn.Module) -> nn.Module | None:
    """What `torch.compile` was given; None where this is no compiled model."""
    return dict(model.named_children()).get("_orig_mod")


def never_compiled(call: Called) -> Called:
    """A decorator, as torch's own optimizers use: `torch.compiler.disable` loads the compiler at once."""
    try:
        disable = _find(NO_COMPILING.owner)._disable_dynamo
    except (ImportError, AttributeError):
        disable = torch.compiler.disable
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


def acts_on_gradient(parameter: Tensor) -> bool:
    """Whether a hook runs as soon as its gradient was accumulated."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    task: int = _get(GRAPH_TASK, torch._C, "_current_graph_task_id")()
    return task != -1


def wrap_backward(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Put `around` what all backward passes of this process go through; returns what takes it off again."""
    run = _get(BACKWARD, torch.autograd, BACKWARD.names[0])
    wrapped = around(run)
    torch.autograd._engine_run_backward = wrapped  # type: ignore[attr-defined]

    def unwrap() -> None:
        if torch.autograd._engine_run_backward is wrapped:  # type: ignore[attr-defined]
            torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]

    return unwrap


def keeps_graph(*args: Any, **_: Any) -> bool:
    """Whether a backward pass of these arguments leaves its graph for another one."""
    return bool(args[2]) if len(args) > 2 else True


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
    """Each source into its target."""
    together = getattr(torch, "_foreach_copy_", None)
    if together is not None:
        together(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def scale_all(targets: Sequence[Tensor], factor: float) -> None:
    together = getattr(torch, "_foreach_mul_", None)
    if together is not None:
        together(list(targets), factor)
        return
    for target in targets:
        target.mul_(factor)


def lerp_all(targets: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """target += weight * (end - target)"""
    together = getattr(torch, "_foreach_lerp_", None)
    if together is not None:
        together(list(targets), list(ends), weight)
        return
    for target, end in zip(targets, ends, strict=True):
        target.lerp_(end, weight)


def norms_of(parts: Sequence[Tensor]) -> list[Tensor]:
    """Euclidean, one a part."""
    together = getattr(torch, "_foreach_norm", None)
    if together is None:
        return [torch.linalg.vector_norm(each) for each in parts]
    return list(together(parts))


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
