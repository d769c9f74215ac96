"""Records what the released code of ExDyna, MiCRO or DEFT chooses: seeded gradients in, indices out.

    git clone https://github.com/kljp/exdyna
    export PYTHONPATH=tests
    python scripts/record_released.py exdyna exdyna/cnn-lstm/gradient_reducers.py ExDynaReducer <commit>

It is run whenever a trace is to be made anew; tests read the traces alone. The released file is
loaded as it is. Around it stand in: ranks that are threads, with `all_gather`, `all_reduce` and `broadcast`
between them; a timer that does nothing; and a short list instead of 128 million random numbers that nobody
reads.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from papers.released import RELEASED, STEPS, TRACES, Released, digest


class Threads:
    """Collectives between threads, one a rank."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.here = threading.local()
        self._barrier = threading.Barrier(world)
        self._given: list[torch.Tensor] = [torch.empty(0)] * world

    def _all(self, given: torch.Tensor) -> list[torch.Tensor]:
        self._given[self.here.rank] = given.clone()
        self._barrier.wait()
        everybody = list(self._given)
        self._barrier.wait()
        return everybody

    def all_gather(self, out: list[torch.Tensor], given: torch.Tensor, **_: Any) -> Any:
        for place, each in zip(out, self._all(given), strict=True):
            place.copy_(each)
        if given.dim() == 0:
            self.here.counts = [int(each) for each in out]
        return SimpleNamespace(wait=lambda: None)

    def all_reduce(self, given: torch.Tensor, **_: Any) -> Any:
        given.copy_(torch.stack(self._all(given)).sum(0))
        return SimpleNamespace(wait=lambda: None)

    def broadcast(self, given: torch.Tensor, root: int, **_: Any) -> Any:
        given.copy_(self._all(given)[root])
        return SimpleNamespace(wait=lambda: None)


def load(path: Path, threads: Threads) -> ModuleType:
    """The released file, with `torch.distributed` between threads."""
    spec = importlib.util.spec_from_file_location("released_code", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    distributed: Any = torch.distributed
    distributed.is_available = lambda: True
    distributed.get_world_size = lambda: threads.world
    distributed.get_rank = lambda: threads.here.rank
    for name in ("all_gather", "all_reduce", "broadcast"):
        setattr(distributed, name, getattr(threads, name))
    few = SimpleNamespace(randn=lambda _: np.zeros(1))
    module.np = SimpleNamespace(random=SimpleNamespace(RandomState=lambda _: few), argsort=np.argsort)  # type: ignore[attr-defined]
    flatten = module.list_to_tensor

    def seen(tensors: list[torch.Tensor]) -> torch.Tensor:
        """The only lists of integers that are put together are the indices of all ranks."""
        flat: torch.Tensor = flatten(tensors)
        if not flat.is_floating_point():
            threads.here.indices = flat.clone()
        return flat

    module.list_to_tensor = seen  # type: ignore[attr-defined]
    return module


@contextlib.contextmanager
def no_timer(*_: Any, **__: Any) -> Iterator[None]:
    yield


def run(case: Released, module: ModuleType, reducer_name: str, threads: Threads) -> list[Any]:
    steps: list[list[Any]] = [[] for _ in range(threads.world)]

    def rank_runs(rank: int) -> None:
        threads.here.rank = rank
        reducer = getattr(module, reducer_name)(
            0, torch.device("cpu"), no_timer, compression=case.scheme.density
        )
        memory = [torch.zeros(size) for size in case.tensors]
        for step in range(STEPS):
            pieces = case.gradient(step, rank).split(case.tensors)
            sent = [piece + kept for piece, kept in zip(pieces, memory, strict=True)]
            reducer.reduce(sent, [torch.zeros_like(piece) for piece in pieces], memory)
            indices = threads.here.indices.sort().values
            steps[rank].append((threads.here.counts, digest([indices.numpy()])))

    ranks = [threading.Thread(target=rank_runs, args=(rank,)) for rank in range(threads.world)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert all(each == steps[0] for each in steps), "ranks chose differently"
    assert len(steps[0]) == STEPS
    return steps[0]


def main() -> None:
    name, path, reducer_name, commit = sys.argv[1:]
    case = RELEASED[name]
    threads = Threads(case.gradients.world)
    steps = run(case, load(Path(path), threads), reducer_name, threads)
    said = {
        "repository": f"https://github.com/kljp/{name}",
        "commit": commit,
        "file": "cnn-lstm/gradient_reducers.py",
        "class": reducer_name,
        "torch": torch.__version__,
        "gradients": case.digest(),
    }
    lines = ",\n".join(json.dumps(step, separators=(",", ":")) for step in steps)
    TRACES.mkdir(parents=True, exist_ok=True)
    (TRACES / f"{name}.json").write_text(
        json.dumps(said, indent=1)[:-2] + f',\n "steps": [\n{lines}\n ]\n}}\n'
    )


if __name__ == "__main__":
    main()
