"""Ok-Topk by its paper, with its release's constants for VGG. Nothing is shared with the package.

Written from a description of the method; no line of the published (GPL) code was used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from papers.gradients import STEPS, Gradients


def oktopk(gradients: Gradients, k: int) -> list[dict[str, Any]]:
    n, world = gradients.n, gradients.world
    e = [np.zeros(n) for _ in range(world)]
    lt, gt = [0.0] * world, 0.0
    edges = [0] * (world + 1)
    steps = []
    for t in range(STEPS):
        a = [e[r] + gradients(t, r) for r in range(world)]
        # Local thresholds and selection.
        local = []
        for r in range(world):
            size = np.abs(a[r])
            if t % 32 == 0:
                lt[r] = float(np.sort(size)[n - k])
            else:
                for _ in range(5):
                    if np.sum(size > lt[r]) > 4 * k / 3:
                        lt[r] *= 1.03
            local.append(np.flatnonzero(size > lt[r]))
        # Regions.
        if t % 64 == 0:
            total = [0] * (world - 1)
            for r in range(world):
                c = len(local[r]) // world
                for j in range(world - 1):
                    total[j] += int(local[r][(j + 1) * c])
            edges = [0, *[cut // world for cut in total], n]
        used = list(lt)
        for r in range(world):
            if len(local[r]) < 2 * k / 3:
                lt[r] /= 1.012
            elif len(local[r]) > 5 * k / 4:
                lt[r] *= 1.012
        # Split and reduce: region by region, but the sums do not depend on who adds them up.
        sums = np.zeros(n)
        for r in range(world):
            sums[local[r]] += a[r][local[r]]
        # Global selection.
        if t % 32 == 0:
            found = np.flatnonzero(sums)
            order = np.argsort(-np.abs(sums[found]), kind="stable")[:k]
            chosen = np.sort(found[order])
            gt = float(np.min(np.abs(sums[chosen])))
        else:
            chosen = np.flatnonzero(np.abs(sums) > gt)
            if len(chosen) < 2 * k / 3:
                gt /= 1.008
            elif len(chosen) > 4 * k / 3:
                gt *= 1.008
        for r in range(world):
            a[r][np.intersect1d(local[r], chosen)] = 0.0
        e = a
        steps.append(
            {
                "threshold": gt,
                "local": list(lt),
                "cuts": list(edges),
                "indices": chosen.tolist(),
                "counts": [len(np.intersect1d(own, chosen)) for own in local],
                "used": used,
            }
        )
    return steps
