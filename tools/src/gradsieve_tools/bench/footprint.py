"""`gradsieve bench memory`: what a sync adds to the memory of a real rank, in multiples of the gradient.

    before   resident memory with parameters, gradients and the optimizer's state in place
    peak     the kernel's own high-water mark over a few steps
    added    (peak - before) over the gradient's size: what a sync keeps and whatever a step needs on top

With SGD a sync keeps less than with AdamW, whose steps it lengthens. Every row has processes of its own,
since a high-water mark never falls.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException

from gradsieve import GradientSync
from gradsieve.errors import GradsieveError
from gradsieve.testing import kernels
from gradsieve_tools.bench.common.machine import check_fits
from gradsieve_tools.bench.common.ranks import leave, run_ranks
from gradsieve_tools.specs import parse

COLUMNS = ["scheme", "optimizer", "world", "params", "before_mb", "peak_mb", "added_n", "step_s"]
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
STEPS = 6  # the first steps only learn whether steps are lengthened
_FLOAT = 4
_WIDTH = 2048  # layers of 2048 x 2048, the shape that bench step's MLP has


def measure(scheme: str, optimizer: str, world: int, params: int, density: float) -> dict[str, Any]:
    """Return one row; raise if a rank fails."""
    # Parameters, gradients, what a sync keeps and what a step needs; with AdamW two moments and two more.
    needed = (9 if optimizer == "AdamW" else 5) * params * _FLOAT * world
    check_fits(needed, f"{world} ranks with {params:,} parameters", "lower --params or --world")
    config = {
        "scheme": scheme,
        "optimizer": optimizer,
        "world": world,
        "params": params,
        "density": density,
        "port": _free_port(),
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        try:
            run_ranks(_rank, (config, str(out)), world)
        except ProcessRaisedException as error:
            raise GradsieveError(f"a rank of {scheme} failed: {error}") from error
        row: dict[str, Any] = json.loads(out.read_text())
    return row


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _rank(rank: int, config: dict[str, Any], out: str) -> None:
    torch.set_num_threads(1)
    world, params = config["world"], config["params"]
    address = f"tcp://127.0.0.1:{config['port']}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    parameters = _parameters(params)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    elements = sum(parameter.numel() for parameter in parameters.values())
    _warm_allocator()
    kernels.active()  # numba's own 110 MB are not the sync's
    optimizer = OPTIMIZERS[config["optimizer"]](parameters.values(), lr=1e-4, foreach=False)  # type: ignore[call-arg]
    optimizer.step()
    before = _resident()
    scheme = parse(config["scheme"], config["density"])
    sync = GradientSync(parameters.items(), optimizer, scheme=scheme)
    seconds = []
    for _ in range(STEPS):
        for parameter in parameters.values():
            assert parameter.grad is not None
            parameter.grad.normal_()
        sync.reduce()
        optimizer.step()
        seconds.append(sum(each for name, each in sync.metrics().items() if name.startswith("seconds_")))
    own = [before, _high_water(), max(seconds[1:])]
    figures = torch.tensor(own, dtype=torch.float64, device="cpu")
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    if rank == 0:
        start, peak, step = figures.tolist()
        row = {
            "scheme": config["scheme"],
            "optimizer": config["optimizer"],
            "world": world,
            "params": elements,
            "before_mb": start / 2**20,
            "peak_mb": peak / 2**20,
            "added_n": (peak - start) / _FLOAT / elements,
            "step_s": step,
        }
        Path(out).write_text(json.dumps(row))
    sync.abandon()
    leave()


def _parameters(params: int) -> dict[str, nn.Parameter]:
    layers = max(1, round(params / _WIDTH**2))
    rows = _WIDTH if params >= _WIDTH**2 else max(1, params // _WIDTH)
    each = [torch.zeros(rows, _WIDTH, dtype=torch.float32, device="cpu") for _ in range(layers)]
    return {f"layer{number}": nn.Parameter(values) for number, values in enumerate(each)}


def _warm_allocator() -> None:
    """Touch what a first call of torch's kernels brings in, which is not the sync's."""
    x = torch.randn(1 << 20, dtype=torch.float32, device="cpu")
    x.abs().topk(10)
    x.sort()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _high_water() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise GradsieveError("this kernel does not report a process's peak memory")
