"""All trainings by frameworks, on two ranks; prints a line of JSON for each end.

    python tests/multiproc/frameworks_script.py FOLDER STEPS SAVE_AT [EXAMPLE ...]

To import the frameworks takes longer than the trainings: it is done once, and ranks are forked from here.
Without the name of an example all of them are run, and those of `framework_edges.py`.
Gradsieve is imported in the ranks alone, so that what they saved is looked at without it.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

WORLD = 2
EXAMPLES = ("plain", "with_accelerate", "with_lightning", "with_trainer")
IMPORTED = ("accelerate", "lightning", "safetensors.torch", "transformers.trainer")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples" / "frameworks")]


def on_ranks(call: Callable[[], None]) -> None:
    """In new processes; the end of all where one fails."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    alive = set()
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
            names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
            os.environ.update({name: str(value) for name, value in names.items()})
            as_rank(call)
        alive.add(pid)
    while alive:
        pid, status = os.wait()
        alive.discard(pid)
        if status != 0:
            for other in alive:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with status {status}")


def as_rank(call: Callable[[], None]) -> None:
    code = 1
    try:
        dist.init_process_group("gloo")
        call()
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # torch's threads and the end of Python race, with plain DDP too: not what is tested here


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # in one piece: both ranks write to one pipe


def main(folder: str, steps: str, save_at: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    for module in IMPORTED[: 1 if names else None]:
        importlib.import_module(module)
    chosen = names or EXAMPLES

    def examples(*words: str) -> None:
        for name in chosen:
            each = [f"{folder}/{name}", "--steps", steps, "--save-at", save_at, *words]
            importlib.import_module(name).main(each)

    def others() -> None:
        if names:
            return
        from multiproc import framework_edges

        for line in framework_edges.main(Path(folder)):
            tell(line)

    on_ranks(lambda: (examples(), others()))  # type: ignore[func-returns-value]
    import task
    from saved import model_saved_by

    assert "gradsieve" not in sys.modules
    models = [model_saved_by(name, Path(folder) / name, int(save_at)) for name in chosen]
    found = [[task.bits(model), task.accuracy(model)] for model in models]
    for name in ("task", "saved"):
        del sys.modules[name]  # a rank's has another rank in it
    tell(json.dumps({"name": "saved", "rank": 0, "found": found}))
    tell(json.dumps({"name": "resume"}))
    on_ranks(lambda: examples("--resume"))


if __name__ == "__main__":
    main(*sys.argv[1:])
