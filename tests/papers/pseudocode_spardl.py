"""SparDL by its paper and release, line by line, on dense vectors. Nothing is shared with the package.

Written from a description of the method; no line of the published code, which has no licence, was used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from papers.gradients import STEPS, Gradients


def top(x: Any, count: int) -> Any:
    """Places of the largest magnitudes that are not zero."""
    order = np.argsort(-np.abs(x), kind="stable")[:count]
    return order[x[order] != 0]


def rounds_of(q: int) -> list[tuple[int, int]]:
    """(gap, size of the bag)"""
    rounds = int(np.ceil(np.log2(q)))
    gaps = [2 ** (rounds - 1 - i) for i in range(rounds)]
    sizes = [q - gaps[0], *gaps[1:]] if rounds else []
    return list(zip(gaps, sizes, strict=True))


def spardl(gradients: Gradients, density: float, d: int, across: str) -> list[dict[str, Any]]:
    n, world = gradients.n, gradients.world
    q = world // d
    c = -(-n // q)
    k_b = int(c * density)
    e = [np.zeros(q * c) for _ in range(world)]
    h = [k_b // d] * q
    step_of, inertia = [int((k_b - k_b // d) / 100)] * q, [False] * q
    steps = []
    for t in range(STEPS):
        orig = [e[r] + np.pad(gradients(t, r), (0, q * c - n)) for r in range(world)]
        held = [acc.copy().reshape(q, c) for acc in orig]
        # Spar-Reduce-Scatter.
        for gap, size in rounds_of(q):
            sent = []
            for r in range(world):
                team, w = divmod(r, q)
                for ahead in range(size):
                    b = (w + gap + ahead) % q
                    chosen = top(held[r][b], k_b)
                    message = np.zeros(c)
                    message[chosen] = held[r][b][chosen]
                    held[r][b][chosen] = 0.0
                    sent.append((team * q + (w + gap) % q, b, message))
            for to, b, message in sent:
                held[to][b] += message
        # Every rank's own block, cut down.
        block = []
        for r in range(world):
            w = r % q
            chosen = top(held[r][w], k_b if d == 1 or across == "r-sag" else h[w])
            own = np.zeros(c)
            own[chosen] = held[r][w][chosen]
            held[r][w][chosen] = 0.0
            block.append(own)
        # Spar-All-Gather between teams.
        if d > 1 and across == "r-sag":
            block = recursive(block, held, q, d, k_b)
        elif d > 1:
            for w in range(q):
                union = sum(block[team * q + w] for team in range(d))
                u = np.count_nonzero(sum(block[team * q + w] != 0 for team in range(d)))
                final = np.zeros(c)
                final[top(union, k_b)] = union[top(union, k_b)]
                for team in range(d):
                    block[team * q + w] = final
                h[w], step_of[w], inertia[w] = controlled(h[w], step_of[w], inertia[w], u <= k_b, k_b, d)
        # Final all-gather and residuals.
        result = np.concatenate([block[w] for w in range(q)])
        final_places = np.flatnonzero(result)
        for r in range(world):
            e[r] = orig[r].copy()
            e[r][final_places] = held[r].reshape(-1)[final_places]
        steps.append(
            {
                "indices": final_places.tolist(),
                "values": result[final_places].tolist(),
                "h": [h[r % q] for r in range(world)] if d > 1 and across == "b-sag" else [0] * world,
            }
        )
    return steps


def controlled(h: int, step: int, inertia: bool, fits: bool, k_b: int, d: int) -> tuple[int, int, bool]:
    if (fits and step > 0) or (not fits and step <= 0):
        if inertia:
            step *= 2
        inertia = not inertia
    else:
        step = -step if abs(step) <= 1 else int(-step / 2)
        inertia = False
    return min(max(h + step, k_b // d), k_b), step, inertia  # min: ours, or h has no upper bound


def recursive(block: list[Any], held: list[Any], q: int, d: int, k_b: int) -> list[Any]:
    """What is dropped in round s lies on 2^(s+1) ranks, each of which keeps its share."""
    power = 1
    while power < d:
        after = []
        for r in range(len(block)):
            team, w = divmod(r, q)
            union = block[r] + block[(team ^ power) * q + w]
            kept = np.zeros_like(union)
            kept[top(union, k_b)] = union[top(union, k_b)]
            held[r][w] += (union - kept) / (2 * power)
            after.append(kept)
        block, power = after, 2 * power
    return block
