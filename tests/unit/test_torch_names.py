"""What gradsieve uses of torch beyond its public names is there and means what it is used for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradsieve import torch_names
from gradsieve.errors import ConfigError
from gradsieve.torch_names import PRIVATE, Private
from gradsieve_tools.doctor.facts import is_there

SECONDS = 123.0


@pytest.fixture(scope="module")
def store() -> Iterator[dist.Store]:
    """Of a group of one rank, as `init_process_group` makes it over a server."""
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=served, rank=0, world_size=1, timeout=timedelta(seconds=SECONDS))
    yield served
    dist.destroy_process_group()


@pytest.fixture
def ddp(store: dist.Store) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(2, 2))


@pytest.fixture
def sharded(store: dist.Store) -> Any:
    return fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))


# --- the list


@pytest.mark.parametrize("private", PRIVATE, ids=lambda private: private.name)
def test_the_installed_torch_has_it(private: Private) -> None:
    assert is_there(private)
    assert private.without


def test_what_is_not_there_is_seen() -> None:
    names = {"owner": "torch", "name": "_no_such_name", "without": "all is well"}
    assert not is_there(Private(**names))
    for owner in ("no.such.module", "torch:NoSuchClass", "nn/no_such_file.py", "nn/parallel/distributed.py"):
        assert not is_there(Private(**{**names, "owner": owner}))
    assert Private(**names).lost.endswith("has no torch: _no_such_name: all is well")


def test_no_name_is_listed_twice() -> None:
    assert len(PRIVATE) == len({private.name for private in PRIVATE}) == 24


def test_a_name_that_vanished_is_lacking_and_refused_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store
) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    assert [private.name for private in PRIVATE if not is_there(private)] == ["_get_default_store"]
    with pytest.raises(ConfigError, match=r"has no .*_get_default_store.*no sync can be attached"):
        torch_names.default_store()


# --- process groups


def test_the_store_is_that_of_the_default_group(store: dist.Store) -> None:
    torch_names.default_store().set("told", "here")
    assert dist.distributed_c10d._get_default_store().get("told") == b"here"


def test_who_waits_on_a_store_does_not_hold_up_another_connection(store: dist.TCPStore) -> None:
    below = dist.PrefixStore("below", store)
    other, same = torch_names.connected_once_more(below), torch_names.connected_once_more(below)
    waiting = threading.Thread(target=below.wait, args=(["awaited"], timedelta(seconds=20)))
    waiting.start()
    other.set("said", "while it waits")
    assert same.get("said") == b"while it waits"
    assert waiting.is_alive()
    another = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    dist.PrefixStore("below", another).set("awaited", "")
    waiting.join(timeout=20)
    assert not waiting.is_alive()


def test_a_store_without_a_server_is_its_own() -> None:
    store = dist.HashStore()
    assert torch_names.connected_once_more(store) is store


def test_the_time_out_is_what_the_user_gave(store: dist.Store) -> None:
    world = dist.group.WORLD
    assert world is not None
    assert torch_names.timeout_of(world) == timedelta(seconds=SECONDS)
    other = dist.new_group([0], timeout=timedelta(seconds=7))
    assert torch_names.timeout_of(other) == timedelta(seconds=7)


def test_rows_are_gathered_by_either_name(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (None, "all_gather_single"):
        if name is not None:
            monkeypatch.delattr(dist, name, raising=False)
        gathered = torch.zeros(3)
        torch_names.all_gather_flat(gathered, torch.arange(3.0), None)
        assert gathered.tolist() == [0.0, 1.0, 2.0]


# --- DistributedDataParallel


def test_a_communication_hook_is_listed_with_its_state(ddp: DistributedDataParallel) -> None:
    assert list(torch_names.comm_hooks_of(ddp)) == []
    state = object()
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ddp.register_comm_hook(state, allreduce_hook)
    ((_, found),) = torch_names.comm_hooks_of(ddp)
    assert found is state


def test_joining_is_seen(ddp: DistributedDataParallel) -> None:
    assert not torch_names.is_joining(ddp)
    with ddp.join():
        assert torch_names.is_joining(ddp)


def test_a_reducer_without_buckets_is_seen(ddp: DistributedDataParallel) -> None:
    assert not torch_names.hands_over_no_buckets(ddp)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        assert torch_names.hands_over_no_buckets(DistributedDataParallel(nn.Linear(2, 2)))


# --- modules and tensors


def test_what_was_compiled_is_found() -> None:
    model = nn.Linear(2, 2)
    assert torch_names.without_compile(model) is model
    compiled: Any = torch.compile(model, backend="eager")
    assert torch_names.without_compile(compiled) is model


@pytest.mark.parametrize("vanished", [False, True])
def test_what_is_never_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, vanished: bool) -> None:
    if vanished:
        monkeypatch.delattr("torch._compile._disable_dynamo")
    compiling = []

    @torch_names.never_compiled
    def hook(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    double = torch.compile(lambda x: hook(x * 2), backend="eager")
    assert double(torch.ones(1)).item() == 3.0
    assert compiling == [False]


def test_a_version_rises_with_every_writing() -> None:
    tensor = torch.zeros(4)
    before = torch_names.version_of(tensor)
    tensor.add_(1)
    tensor[:2].add_(1)
    assert torch_names.version_of(tensor) == before + 2
    torch.autograd.graph.increment_version([tensor])
    assert torch_names.version_of(tensor) == before + 3


def test_memory_that_a_graph_saved_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.ones(2, 3), torch.ones(2, 3)
    before = torch_names.uses_of(first)
    assert torch_names.uses_of(first) == before
    weight = nn.Parameter(first)
    weight.data = first
    loss = nn.functional.linear(torch.ones(4, 3, requires_grad=True), weight).sum()
    weight.data = second
    assert torch_names.uses_of(first) > before
    loss.backward()
    assert torch_names.uses_of(first) == before
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    unknown = torch_names.uses_of(first)
    assert unknown != unknown  # it equals nothing, so that nobody takes it for unchanged


def test_backward_is_told_from_forward() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(torch_names.is_in_backward()))
    (x * 2).sum().backward()
    seen.append(torch_names.is_in_backward())
    assert seen == [True, False]


def test_the_end_of_the_outermost_pass_is_heard_of_once_and_not_of_one_that_breaks_off() -> None:
    ended: list[int] = []

    def watch(_: torch.Tensor) -> None:
        torch_names.after_backward(lambda: ended.append(torch_names.running_pass()))

    x = torch.ones(2, requires_grad=True)
    inner = torch.utils.checkpoint.checkpoint(torch.square, x, use_reentrant=True)
    inner.register_hook(watch)
    inner.sum().backward()
    assert len(ended) == 1
    broken = x * 2
    broken.register_hook(watch)
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        broken.sum().backward()
    assert len(ended) == 1
    assert torch_names.running_pass() == -1


def test_steps_that_torch_calls_hooks_around_are_known_and_can_do_without() -> None:
    class Forgetful(torch.optim.Optimizer):
        def __init__(self) -> None:  # and never torch's own
            self.param_groups: list[Any] = []

        def step(self, closure: Any = None) -> None: ...

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, heard = torch.optim.SGD([parameter], lr=0.5), []
    optimizer.register_step_pre_hook(lambda *_: heard.append(1))
    parameter.grad = torch.ones(2)
    torch_names.step_without_hooks(optimizer)
    assert parameter.tolist() == [0.5, 0.5]
    assert not heard
    assert torch_names.calls_hooks(optimizer)
    assert not torch_names.calls_hooks(Forgetful())
    assert not torch_names.calls_hooks(object())


# --- fully_shard


def test_a_shard_is_its_own_memory_and_always_the_same_object(sharded: Any) -> None:
    local = torch_names.plain_part_of(sharded.weight)
    assert local is torch_names.plain_part_of(sharded.weight)
    assert type(local) is torch.Tensor
    local.fill_(7.0)
    assert torch.equal(sharded.weight.full_tensor(), torch.full((2, 3), 7.0))


def test_fsdp_gathers_from_the_flat_tensor_that_is_found(sharded: Any) -> None:
    (group,) = torch_names.shard_groups_of(sharded)
    flats = torch_names.shard_flats_of(group)
    assert set(flats) == set(sharded.parameters())
    for parameter, flat in flats.items():
        local, ones = torch_names.plain_part_of(parameter), torch.ones_like(flat)
        assert flat.data_ptr() == local.data_ptr()
        flat.data, local.data = ones, ones.view(local.shape)
    assert sharded(torch.ones(1, 3)).tolist() == [[4.0, 4.0]]


def test_a_torch_whose_shards_say_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"_all_reduce_hook.*attach\(replicate=...\) is refused"):
        torch_names.set_averaging_hook(SimpleNamespace(), lambda: None)


def test_averaging_is_heard_but_in_passes_that_accumulate(sharded: Any) -> None:
    (group,) = torch_names.shard_groups_of(sharded)
    assert torch_names.averaging_hook_of(group) is None
    heard: list[int] = []
    torch_names.set_averaging_hook(group, lambda: heard.append(1))
    assert torch_names.averaging_hook_of(group) is not None
    sharded(torch.ones(1, 3)).sum().backward()
    assert heard == [1]
    sharded.set_requires_all_reduce(False)
    sharded(torch.ones(1, 3)).sum().backward()
    assert heard == [1]
    sharded.set_requires_all_reduce(True)
    torch_names.set_averaging_hook(group, None)
    sharded(torch.ones(1, 3)).sum().backward()
    assert heard == [1]
    assert torch_names.averaging_hook_of(group) is None


def test_a_store_that_is_gone_is_not_waited_for(store: dist.TCPStore) -> None:
    """`Watch.close` waits one second for the thread that tries. Found by `lab chaos`: c10d took up to two."""
    assert torch_names.connected_to(store, 8.0).check(["nothing"]) is False
    with socket.create_server(("127.0.0.1", 0)) as free:
        gone = SimpleNamespace(host="127.0.0.1", port=free.getsockname()[1])
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="Connection refused"):
        torch_names.connected_to(gone, 8.0)  # type: ignore[arg-type]
    assert time.monotonic() - began < 8.0
