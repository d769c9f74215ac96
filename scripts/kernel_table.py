"""What compilers make of the Triton kernels, for GPUs that are not here: registers, stack, barriers.

    python scripts/kernel_table.py --json benchmarks/results/kernels.json

Nothing says what a launch looks like but the launch itself: the package's functions are called on tensors of
every type and alignment that they take, and each launch is compiled as Triton would compile it there. Triton
keeps what it compiled (`TRITON_CACHE_DIR`, or ~/.triton), so that a second run only reads it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TARGETS = {
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "sm_75": GPUTarget("cuda", 75, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
}
MODULES = ["triton_passes", "triton_low_bit"]
_N = 4096
_HUGE = 1 << 31
"""Elements of which not every index is an int32."""
_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Launch:
    """A kernel, and all that its machine code depends on."""

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        types = [each for each in self.types.values() if each != "constexpr"]
        constants = [f"{name}={value}" for name, value in self.constants.items()]
        return " ".join([self.kernel.__name__, *types, *constants])

    def compiled(self, target: GPUTarget) -> Any:
        source = triton.compiler.ASTSource(
            fn=self.kernel, signature=dict(self.types), constexprs=dict(self.constants)
        )
        return triton.compile(source, target=target, options=dict(self.options))


@contextmanager
def recorded() -> Iterator[dict[str, Launch]]:
    """What is launched inside, by name; nothing runs."""
    found: dict[str, Launch] = {}

    def record(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launch = _launch(kernel, given, named)
        found[launch.name] = launch

    with mock.patch.object(JITFunction, "run", record):
        yield found


def _launch(kernel: Any, given: Sequence[Any], named: Mapping[str, Any]) -> Launch:
    values = dict(zip(kernel.arg_names, given, strict=False)) | {
        name: value for name, value in named.items() if name in kernel.arg_names
    }
    types, constants = {}, {}
    for parameter in kernel.params:
        value = values[parameter.name]
        if parameter.is_constexpr:
            types[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if not isinstance(value, float) and not parameter.do_not_specialize:
            raise ValueError(f"{kernel.__name__} has other code where {parameter.name} is 1, or even: which?")
        types[parameter.name] = _type_of(value)
    options = {name: value for name, value in named.items() if name not in kernel.arg_names}
    if options.get("enable_fp_fusion") is not False:
        raise ValueError(f"{kernel.__name__} may round a product and a sum only once")
    return Launch(kernel, types, constants, options)


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -_HUGE <= value < _HUGE else "i64"


def launches(backend: str) -> dict[str, Launch]:
    """All that the package launches on devices of this kind."""
    with mock.patch.object(torch.version, "hip", "7" if backend == "hip" else None):
        modules = [importlib.import_module(f"gradsieve.kernels.{name}") for name in MODULES]
        modules = [importlib.reload(module) for module in modules]  # some choices are made for a backend
    with recorded() as found:
        for make in (_aligned, _unaligned, _huge):
            _launch_kernels(modules[0], make)
        _launch_low_bit(modules[1])
    return found


def _aligned(dtype: torch.dtype) -> Tensor:
    return torch.zeros(_N, dtype=dtype)


def _unaligned(dtype: torch.dtype) -> Tensor:
    return torch.zeros(_N + 1, dtype=dtype)[1:]


def _huge(dtype: torch.dtype) -> Tensor:
    return torch.empty(_HUGE, dtype=dtype, device="meta")


def _launch_kernels(form: Any, make: Callable[[torch.dtype], Tensor]) -> None:
    x = make(torch.float32)
    for narrow in (torch.float32, torch.bfloat16, torch.float16):
        own = make(narrow)
        form.apply(x, own, x, x, x, 2)
        form.rebase(x, own, x, 0.5)
        form.residual(x, own, x)
        form.residual(x, own, own)


def _launch_low_bit(form: Any) -> None:
    even = importlib.import_module("gradsieve.kernels.blocks").even
    for bits in (1, 2, 4):
        for count, device in ((1, "cpu"), (300, "cpu"), (_HUGE, "meta")):
            values = torch.empty((2, count), dtype=torch.float32, device=device)
            data = form.encode_low(bits, values, even(count))
            form.decode_low(bits, data, values, even(count), False)
            form.decode_low(bits, data, values[0], even(count), True)


@dataclass(frozen=True)
class Use:
    """Of a compiled kernel."""

    registers: int
    stack: int
    """Bytes of local memory a thread, those that registers are spilled to among them."""
    spills: int
    """Registers, which AMD's compiler counts apart."""
    shared: int
    barriers: int
    inexact: int
    """Products fused with sums, divisions that are not rounded correctly, denormals taken for 0; what correct
    divisions are made of does not count."""
    moved: int = 0
    """Bytes that a thread reads and writes in global memory, by all its instructions; of NVIDIA's only."""
    widest: int = 0
    """Bytes, of these instructions; of NVIDIA's only."""


def use_of(compiled: Any) -> Use:
    shared = compiled.metadata.shared
    if "cubin" in compiled.asm:
        registers, stack, local = _cubin_use(compiled.asm["cubin"])
        ptx = compiled.asm["ptx"]
        inexact = len(re.findall(r"\b(?:fma|mad)\.rn\S*\.f32|\.ftz\b|\b(?:div\.full|\w+\.approx)\.", ptx))
        barriers = len(re.findall(r"\bbar\.sync\b", ptx))
        accesses = re.findall(r"\b(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)", ptx)
        sizes = [int(lanes or 1) * int(bits) // 8 for lanes, bits in accesses]
        return Use(registers, stack + local, 0, shared, barriers, inexact, sum(sizes), max(sizes))
    code = compiled.asm["amdgcn"]
    said = {name: int(value) for name, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", code, re.MULTILINE)}
    count = {name: len(re.findall(rf"^\s+{name}", code, re.MULTILINE)) for name in _AMD}
    inexact = sum(count[name] for name in _AMD[2:]) - 6 * count["v_div_fixup_f32"]
    stack, spills = said["private_segment_fixed_size"], said["vgpr_spill_count"] + said["sgpr_spill_count"]
    return Use(said["vgpr_count"], stack, spills, shared, count["s_barrier"], inexact)


_AMD = (
    *("s_barrier", "v_div_fixup_f32", "v_rcp_f32"),
    *("v_fma_f32", "v_fmac_f32", "v_mac_f32", "v_mad_f32", "v_pk_fma_f32"),
)
"""What is counted. A correct division ends with the second; of the others it has an inverse and five."""


def _cubin_use(cubin: bytes) -> tuple[int, int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said.stdout + said.stderr)
    assert found is not None, said
    registers, stack, local = map(int, found.groups())
    return registers, stack, local


def measured(target: str) -> list[tuple[str, Use]]:
    """Every launch, for one target."""
    found = launches(TARGETS[target].backend)
    return [(name, use_of(launch.compiled(TARGETS[target]))) for name, launch in found.items()]


def table(targets: Sequence[str], jobs: int = 2) -> dict[str, dict[str, Use]]:
    """By launch and target."""
    os.environ.pop("TRITON_INTERPRET", None)
    rows: dict[str, dict[str, Use]] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for target, column in zip(targets, pool.map(measured, targets), strict=True):
            for name, use in column:
                rows.setdefault(name, {})[target] = use
    return rows


WITHOUT_BARRIERS = {"_apply", "_rebase", "_waiting", "_encode", "_decode"}


def faults(rows: Mapping[str, Mapping[str, Use]]) -> list[str]:
    """What a kernel must not have."""
    found = []
    for name, row in rows.items():
        kernel = name.split()[0]
        for target, use in row.items():
            if use.stack or use.spills:
                found.append(f"{use.stack} bytes of stack, {use.spills} spills on {target}: {name}")
            if use.inexact:
                found.append(f"{use.inexact} inexact operations on {target}: {name}")
            if "aligned=True" in name and use.moved and use.widest < 16:
                found.append(f"{use.widest} bytes at once on {target}: {name}")
            if use.barriers and kernel in WITHOUT_BARRIERS:
                found.append(f"{use.barriers} barriers on {target}: {name}")
    return found


def bytes_an_element(name: str, row: Mapping[str, Use]) -> float | None:
    """Of kernels in which each thread has four elements, and code for whole blocks and for the last one."""
    moved = {use.moved for use in row.values()} - {0}
    if name.split()[0] not in {"_apply", "_rebase", "_waiting"} or len(moved) != 1:
        return None
    return moved.pop() / 2 / 4


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    begin = time.monotonic()
    rows = table(options.targets, options.jobs)
    print(f"{len(rows)} launches for {len(options.targets)} targets in {time.monotonic() - begin:.0f} s")
    if options.json:
        options.json.write_text(_written(rows, f"python scripts/kernel_table.py --json {options.json}"))
    found = faults(rows)
    print(*found, sep="\n")
    return 1 if found else 0


def _written(rows: Mapping[str, Mapping[str, Use]], command: str) -> str:
    """A line a launch. What is not there is 0 on every target."""
    lines = []
    for name, row in rows.items():
        line: dict[str, Any] = {"launch": name}
        if (size := bytes_an_element(name, row)) is not None:
            line["bytes an element"] = size
        for kind in ("registers", "stack", "spills", "shared", "barriers"):
            column = {target: getattr(use, kind) for target, use in row.items()}
            if any(column.values()):
                line[kind] = column
        lines.append(json.dumps(line))
    head = json.dumps({"command": command, "triton": triton.__version__}, indent=1)
    return head[:-2] + ',\n "results": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


if __name__ == "__main__":
    sys.exit(main())
