"""What kernels cost on one core, in this tree and in another one: interleaved, by ratio.

    git worktree add /tmp/before COMMIT
    python benchmarks/kernels.py /tmp/before/src --json benchmarks/results/kernels-numba.json

Each tree runs in a process of its own, and only one of them at a time: rounds alternate, and each ratio is
that of two measurements next to each other, so that other work on the machine meets both. The figures are
the median of the ratios and the least milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

HERE = Path(__file__).parents[1] / "src"
ELEMENTS = 7_500_000
ROUNDS = 40


def calls(n: int) -> dict[str, Callable[[], object]]:
    from gradsieve import kernels

    source = torch.Generator().manual_seed(0)
    x, own, anchor, out = torch.randn(4, n, generator=source)
    zeros = torch.where(torch.rand(n, generator=source) < 0.5, 0.0, x)
    found: dict[str, Callable[[], object]] = {
        "accumulate": lambda: kernels.accumulate(x, own, 0.9, out),
        "is_finite": lambda: kernels.is_finite(x),
        "above, 1 in 1000": lambda: kernels.above(x, 3.29),
        "residual": lambda: kernels.residual(anchor, own, out),
        "rebase": lambda: kernels.rebase(x, own, anchor, 0.5),
    }
    for bits in (1, 2, 4):
        for kind, values in {"": x, ", half zeros": zeros}.items():
            data = kernels.encode_low(bits, values)
            rows = torch.stack([data, data])
            found |= {
                f"encode {bits}{kind}": lambda b=bits, v=values: kernels.encode_low(b, v),
                f"decode {bits}{kind}": lambda b=bits, d=data: kernels.decode_low_into(b, d, out),
                f"sum of two {bits}{kind}": lambda b=bits, d=rows: kernels.decode_low_sum(b, d, n, x.dtype),
            }
    return found


def serve(n: int) -> None:
    """Answers each name with the seconds of one call."""
    torch.set_num_threads(1)
    known = calls(n)
    print(*known, sep="\t", flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        known[line.rstrip("\n")]()
        print(time.perf_counter() - begin, flush=True)


@contextmanager
def server(sources: Path, n: int) -> Iterator[Callable[[str], str]]:
    command = [sys.executable, __file__, "--serve", "--elements", str(n)]
    environment = os.environ | {"PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as process:  # noqa: S603
        assert process.stdin is not None
        assert process.stdout is not None
        sent, received = process.stdin, process.stdout

        def ask(name: str) -> str:
            if name:
                print(name, file=sent, flush=True)
            return received.readline().rstrip("\n")

        yield ask
        sent.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="src of the other tree")
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.elements)
        return
    rows = []
    with server(options.before, options.elements) as before, server(HERE, options.elements) as after:
        known = after("").split("\t")
        for name in [name for name in before("").split("\t") if name in known]:
            pairs = [(float(before(name)), float(after(name))) for _ in range(options.rounds + 1)][1:]
            least = [round(1e3 * min(column), 2) for column in zip(*pairs, strict=True)]
            ratio = round(median(new / old for old, new in pairs), 3)
            rows.append({"kernel": name, "ratio": ratio, "ms before": least[0], "ms after": least[1]})
            print(f"{name:25} {ratio:6.2f}   {least[0]:8.2f} {least[1]:8.2f} ms", flush=True)
    if options.json:
        head = {"command": f"python benchmarks/kernels.py BEFORE --json {options.json}"}
        head |= {"elements": options.elements, "rounds": options.rounds, "torch": torch.__version__}
        options.json.write_text(json.dumps(head | {"results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
