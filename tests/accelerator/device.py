"""The fake device (`device.cpp`) in Python: how it is built and loaded, and a process group for it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, _create_work_from_future
from torch.utils.cpp_extension import include_paths, library_paths

NAME = "fake"
BACKEND = "fakeccl"
_current_stream = torch.accelerator.current_stream  # as it is before a test plants a fault
_SOURCE = Path(__file__).with_name("device.cpp")


def build() -> Path:
    """The compiled device, once for each torch and source. By the compiler alone: the gate has no ninja."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    assert compiler is not None, "no C++ compiler: the gate installs g++ (.ci/run)"
    key = hashlib.sha256(
        _SOURCE.read_bytes() + Path(__file__).read_bytes() + torch.__version__.encode()
    ).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"gradsieve-fake-device-{os.getuid()}"
    library = folder / f"{key}.so"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        new = folder / f"{key}.{os.getpid()}"  # of several who build it at once, the last one's stays
        include = [f"-I{path}" for path in include_paths()]
        link = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
        # NDEBUG as in torch's own build: some of its classes have more fields without it.
        flags = ["-std=c++20", "-O0", "-DNDEBUG", "-w", "-fPIC", "-shared"]
        libraries = ["-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run(
            [compiler, *flags, *include, str(_SOURCE), "-o", str(new), *link, *libraries], check=True
        )
        new.rename(library)
    return library


def load(library: Path) -> torch.device:
    """The device, from now on in this process: torch has room for one from outside, for good."""
    if not hasattr(torch, NAME):
        torch.ops.load_library(library)
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _module())
        torch.utils.generate_methods_for_privateuse1_backend()
        dist.Backend.register_backend(BACKEND, FakeCcl, devices=[NAME])
    return torch.device(NAME, 0)


def _module() -> ModuleType:
    """What `torch.cuda` is for CUDA, as far as torch asks for it."""
    device = torch.device(NAME, 0)
    names: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda _: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
        "Stream": lambda priority=0: torch.Stream(device, priority=priority),
        "Event": lambda **_: torch.Event(device),
        "stream": lambda stream: stream,
        "current_stream": lambda: _current_stream(device),
        "synchronize": lambda: torch.accelerator.synchronize(device),
    }
    module = ModuleType(f"torch.{NAME}")
    vars(module).update(names)
    return module


class FakeCcl(dist.ProcessGroup):
    """As NCCL: it takes tensors of the device alone, on a stream of its own, and the host does not wait. Gloo
    carries them, from where they lie."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = ProcessGroupGloo(PrefixStore(BACKEND, store), rank, size, timeout)
        self._timeout, self._rank, self._world = timeout, rank, size
        self._device = torch.device(NAME, 0)
        self._stream = torch.Stream(self._device)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        (tensor,) = tensors
        return self._run("all_reduce", [tensor], tensors, lambda: self._sum(_host(tensor), opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        (tensor,) = tensors
        is_root = opts.rootRank == self._rank
        read, written = (tensors, []) if is_root else ([], tensors)
        return self._run(
            "broadcast", read, written, lambda: self._gloo.broadcast([_host(tensor)], opts).wait()
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        (gathered,), (own,) = outputs, inputs
        hosts = [_host(each) for each in gathered]
        return self._run(
            "all_gather", inputs, gathered, lambda: self._gloo.allgather([hosts], [_host(own)]).wait()
        )

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        rows = [*_host(output).view(self._world, -1)]
        return self._run(
            "all_gather", [own], [output], lambda: self._gloo.allgather([rows], [_host(own).view(-1)]).wait()
        )

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, every: Tensor, opts: Any = None) -> Any:
        def run() -> None:
            total = _host(every).clone()
            self._sum(total, opts)
            _host(output).view(-1).copy_(total.view(self._world, -1)[self._rank])

        return self._run("reduce_scatter", [every], [output], run)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> Any:
        def run() -> None:
            splits = (output_splits or [], input_splits or [])
            self._gloo.alltoall_base(_host(output), _host(own), *splits).wait()

        return self._run("all_to_all", [own], [output], run)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        return self._run("send", tensors, [], lambda: self._gloo.send([_host(tensors[0])], to, tag).wait())

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self._run(
            "recv", [], tensors, lambda: self._gloo.recv([_host(tensors[0])], source, tag).wait()
        )

    def barrier(self, opts: Any = None) -> Any:
        return self._run("barrier", [], [], lambda: self._gloo.barrier().wait())

    def _sum(self, tensor: Tensor, opts: Any) -> None:
        """Or what else is asked for. Gloo knows no mean."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        is_mean = op == dist.ReduceOp.AVG
        self._gloo.allreduce([tensor], dist.ReduceOp.SUM if is_mean else op).wait()
        if is_mean:
            tensor /= self._world

    def _run(self, name: str, read: list[Tensor], written: list[Tensor], carry: Any) -> Any:
        for tensor in read + written:
            if tensor.device != self._device:
                raise RuntimeError(f"{BACKEND} takes tensors on {self._device}, not on {tensor.device}")
        self._stream.wait_stream(_current_stream(self._device))
        done: Any = torch.futures.Future(devices=[self._device])
        with torch.no_grad(), self._stream:
            torch.ops.gradsieve_fake.launch(name, read, written)
            carry()
            for tensor in read + written:
                tensor.record_stream(self._stream)
            done.set_result(written)
        return _create_work_from_future(done)

    # What torch and gradsieve ask a group for.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def size(self) -> int:
        return self._world

    def rank(self) -> int:
        return self._rank

    @property
    def _device_types(self) -> list[torch.device]:
        return [self._device]

    def _get_backend(self, _: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=self._timeout), supports_splitting=False)

    @property
    def bound_device_id(self) -> None:
        return None


def _host(tensor: Tensor) -> Tensor:
    """The same memory, for gloo."""
    view: Tensor = torch.ops.gradsieve_fake.host_view(tensor.detach())
    return view
