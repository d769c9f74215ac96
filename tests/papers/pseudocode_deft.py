"""DEFT by its paper and release, line by line. Nothing is shared with the package."""

from __future__ import annotations

from typing import Any

import numpy as np

from papers.gradients import STEPS, Gradients


def layers_of(tensors: list[int], world: int) -> list[tuple[int, int]]:
    n, start, layers = sum(tensors), 0, []
    for numel in tensors:
        pieces = [numel]
        if numel > n / world:
            pieces = [numel // world + (1 if p < numel % world else 0) for p in range(world)]
        for size in pieces:
            layers.append((start, start + size))
            start += size
    return layers


def local_k(a: Any, layers: list[tuple[int, int]], k: int) -> list[int]:
    norms = [float(np.sqrt(np.sum(a[lo:hi] * a[lo:hi]))) for lo, hi in layers]
    k_l = [0] * len(layers)
    rk, rn = k, sum(norms)
    for layer in np.argsort([-norm for norm in norms], kind="stable"):
        size = layers[layer][1] - layers[layer][0]
        t = int(rk * norms[layer] / rn) if rn > 0 else 0
        k_l[layer] = size if size < t else max(1, t)
        rk -= k_l[layer]
        rn -= norms[layer]
    return k_l


def deft(gradients: Gradients, k: int, tensors: list[int]) -> list[dict[str, Any]]:
    n, world = gradients.n, gradients.world
    layers = layers_of(tensors, world)
    e = [np.zeros(n) for _ in range(world)]
    steps = []
    for t in range(STEPS):
        a = [e[r] + gradients(t, r) for r in range(world)]
        k_of = [local_k(a[r], layers, k) for r in range(world)]
        # The leader packs.
        leader_k = k_of[t % world]
        sizes = [hi - lo for lo, hi in layers]
        common = [layer for layer in range(len(layers)) if leader_k[layer] == sizes[layer]]
        cost = [
            sizes[layer] * np.log2(leader_k[layer]) if leader_k[layer] > 1 else float(sizes[layer])
            for layer in range(len(layers))
        ]
        bins: list[list[int]] = [[] for _ in range(world)]
        filled = [0.0] * world
        for layer in np.argsort([-each for each in cost], kind="stable"):
            if layer not in common:
                least = filled.index(min(filled))
                bins[least].append(int(layer))
                filled[least] += cost[layer]
        # Everybody selects in its bin.
        idx, ks = [], []
        for r in range(world):
            mine = []
            for layer in bins[(t + r) % world]:
                lo, hi = layers[layer]
                top = np.argsort(-np.abs(a[r][lo:hi]), kind="stable")[: k_of[r][layer]]
                mine += [int(lo + j) for j in top]
            ks.append(len(mine))
            idx += mine
        for layer in common:
            idx += list(range(*layers[layer]))
        for r in range(world):
            a[r][idx] = 0.0
        e = a
        steps.append({"longest": max(ks), "rows": sum(ks), "indices": sorted(idx)})
    return steps
