"""Kernels with faults that `scripts/kernel_table.py` has to find. As a program, it prints what was found."""

from __future__ import annotations

import sys
from typing import Any

import kernel_table
import triton
import triton.language as tl


@triton.jit
def _hoard(x, out, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keeps more values than there are registers."""
    i = tl.arange(0, size)
    value = tl.load(x + i)
    tl.store(out + i, value - tl.max(value, 0))


@triton.jit
def _fuse(x, out, size: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, size)
    value = tl.load(x + i)
    tl.store(out + i, value * value + 1.0)


@triton.jit
def _divide(x, out, size: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, size)
    value = tl.load(x + i)
    tl.store(out + i, value / (value + 1.0))


@triton.jit
def _divide_correctly(x, out, size: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, size)
    value = tl.load(x + i)
    tl.store(out + i, tl.div_rn(value, value + 1.0))


@triton.jit
def _apply(x, out, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Named as one that needs no barrier."""
    i = tl.arange(0, size)
    tl.store(out + i, tl.sum(tl.load(x + i), 0) + i)


FEW = {"sm_80": {"maxnreg": 32}, "gfx942": {"waves_per_eu": 8}}
"""Ways to have few registers."""


def found_on(target: str) -> list[str]:
    def use(kernel: Any, size: int, **options: Any) -> kernel_table.Use:
        types = {"x": "*fp32", "out": "*fp32", "size": "constexpr"}
        launch = kernel_table.Launch(kernel, types, {"size": size}, options)
        return kernel_table.use_of(launch.compiled(kernel_table.TARGETS[target]))

    rows = {
        "_hoard": use(_hoard, 4096, num_warps=1, enable_fp_fusion=False, **FEW[target]),
        "_fuse": use(_fuse, 256, enable_fp_fusion=True),
        "_apply": use(_apply, 1024, enable_fp_fusion=False),
        "_narrow aligned=True": use(_fuse, 256, enable_fp_fusion=False),
        "_divide": use(_divide, 256, enable_fp_fusion=False),
        "_sound": use(_fuse, 256, enable_fp_fusion=False),
        "_divide_correctly": use(_divide_correctly, 256, enable_fp_fusion=False),
    }
    return kernel_table.faults({name: {target: each} for name, each in rows.items()})


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(*found_on(name), sep="\n")
