"""One rank of the trainings of examples/frameworks, one after the other in one process.

torchrun --nproc-per-node 2 tests/multiproc/frameworks_script.py whole|resume FOLDER STEPS SAVE_AT NAME...
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "frameworks"))


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    way, folder, steps, save_at, *names = sys.argv[1:]
    dist.init_process_group("gloo")
    for name in names:
        words = [f"{folder}/{name}", "--steps", steps, "--save-at", save_at]
        importlib.import_module(name).main(words + ["--resume"] * (way == "resume"))
    dist.barrier()


if __name__ == "__main__":
    main()
    os._exit(0)  # torch's threads and the end of Python race, with plain DDP too: not what is tested here
