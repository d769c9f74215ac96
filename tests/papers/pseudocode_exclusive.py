"""ExDyna and MiCRO by their papers and releases, line by line. Nothing is shared with the package."""

from __future__ import annotations

from typing import Any

import numpy as np

from papers.gradients import STEPS, Gradients


def split(total: int, parts: int) -> list[int]:
    sizes = [total // parts] * parts
    for part in range(total % parts):
        sizes[part] += 1
    return sizes


def scaled(th: float, k_prev: int, k: int) -> float:
    q = k_prev / k
    if q > 1.1:
        return th * 1.005
    if q > 1 / 1.1:
        return th * 1.00125
    return th * 0.995


def exdyna(gradients: Gradients, k: int) -> list[dict[str, Any]]:
    n, world = gradients.n, gradients.world
    a = n // 1024
    sz_blk = a - a % 32
    blk_part = split(1024, world)
    min_blk = 1024 / (4 * world)
    th = 1 / (2 * np.sqrt(k))
    e = [np.zeros(n) for _ in range(world)]
    ks, k_prev, steps = [0] * world, 0, []
    for t in range(STEPS):
        if t > 0:
            load = [0] * world
            for i in range(world):
                load[((t - 1) + i) % world] = ks[i]
            avg = k_prev // world
            est = int(sz_blk * (k_prev / n))
            for i in range(world - 1):
                x, y = load[i] / avg, load[i + 1] / avg
                if x > 1.05 and y < 1 / 1.05 and blk_part[i] - 1 >= min_blk:
                    blk_part[i] -= 1
                    blk_part[i + 1] += 1
                    load[i] -= est
                    load[i + 1] += est
                if x < 1 / 1.05 and y > 1.05 and blk_part[i + 1] - 1 >= min_blk:
                    blk_part[i] += 1
                    blk_part[i + 1] -= 1
                    load[i] += est
                    load[i + 1] -= est
            th = scaled(th, k_prev, k)
        starts = [sz_blk * sum(blk_part[:p]) for p in range(world)]
        stops = [*starts[1:], n]
        e, ks, idx = exclusive_step(gradients, e, starts, stops, th, t)
        k_prev = len(idx)
        steps.append({"threshold": th, "counts": ks, "cuts": list(blk_part), "indices": idx})
    return steps


def micro(gradients: Gradients, k: int) -> list[dict[str, Any]]:
    n, world = gradients.n, gradients.world
    sizes = split(n, world)
    starts = [sum(sizes[:p]) for p in range(world)]
    stops = [sum(sizes[: p + 1]) for p in range(world)]
    th = 1 / (2 * np.sqrt(k))
    e = [np.zeros(n) for _ in range(world)]
    k_prev, steps = 0, []
    for t in range(STEPS):
        if t > 0:
            th = scaled(th, k_prev, k)
        e, ks, idx = exclusive_step(gradients, e, starts, stops, th, t)
        k_prev = len(idx)
        steps.append({"threshold": th, "counts": ks, "indices": idx})
    return steps


def exclusive_step(
    gradients: Gradients, e: list[Any], starts: list[int], stops: list[int], th: float, t: int
) -> tuple[list[Any], list[int], list[int]]:
    """Selection, gather and residuals: counts by rank, all indices in order."""
    world = gradients.world
    a = [e[r] + gradients(t, r) for r in range(world)]
    ks, idx = [], []
    for r in range(world):
        p = (t + r) % world
        mine = [int(j) for j in starts[p] + np.flatnonzero(np.abs(a[r][starts[p] : stops[p]]) >= th)]
        if not mine:
            mine = [starts[p] + t % (stops[p] - starts[p])]
        ks.append(len(mine))
        idx += mine
    for r in range(world):
        a[r][idx] = 0.0
    return a, ks, sorted(idx)
