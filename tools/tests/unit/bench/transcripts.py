"""Each rival once more, in a straight line: all ranks' models as rows of one matrix, no engine, no messages.

Every function trains the tiny task and returns the model that rank 0 has at the end, laid end to end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from gradsieve.kernels.blocks import Blocks, block_layout
from gradsieve.schemes import Values
from gradsieve.schemes.baselines.randomk import turn
from gradsieve.wire.values import VALUE_CODECS
from gradsieve_tools.bench.common.virtual import own_batches
from gradsieve_tools.bench.tasks import training as tasks
from tiny_task import TASK

SEED = 3


class Ranks:
    """Models and optimizers of `world` ranks; a row of `models` is a rank's."""

    def __init__(self, world: int, steps: int) -> None:
        self.world, self.steps = world, steps
        self.trainings = [tasks.build(TASK, SEED, steps) for _ in range(world)]
        self.feeds = [own_batches(one, rank, world, True, SEED) for rank, one in enumerate(self.trainings)]

    def backward(self) -> None:
        for training, feed in zip(self.trainings, self.feeds, strict=True):
            batch = training.train.take(next(feed))
            training.optimizer.zero_grad()
            training.loss(training.model(*batch.inputs), batch.target).backward()

    def take_steps(self) -> None:
        for training in self.trainings:
            training.optimizer.step()
            training.schedule.step()

    def rest(self) -> None:
        """A step of the schedule alone."""
        for training in self.trainings:
            training.optimizer.zero_grad()
        self.take_steps()

    @property
    def gradients(self) -> Tensor:
        rows = [torch.cat([p.grad.flatten() for p in one.model.parameters()]) for one in self.trainings]
        return torch.stack(rows)

    @property
    def models(self) -> Tensor:
        rows = [nn.utils.parameters_to_vector(one.model.parameters()).detach() for one in self.trainings]
        return torch.stack(rows).clone()

    def write(self, rows: Tensor) -> None:
        for training, row in zip(self.trainings, rows, strict=True):
            sizes = [p.numel() for p in training.model.parameters()]
            for parameter, part in zip(training.model.parameters(), row.split(sizes), strict=True):
                parameter.data.copy_(part.view_as(parameter))

    def everywhere(self, row: Tensor) -> None:
        self.write(row.expand(self.world, -1))

    def backwards(self, rows: Tensor) -> Tensor:
        """With the last parameter first, as the engine lays them, and back again."""
        sizes = [p.numel() for p in self.trainings[0].model.parameters()]
        return torch.cat(rows.split(sizes, dim=-1)[::-1], dim=-1)

    def forwards(self, rows: Tensor) -> Tensor:
        sizes = [p.numel() for p in self.trainings[0].model.parameters()][::-1]
        return torch.cat(rows.split(sizes, dim=-1)[::-1], dim=-1)


def local_sgd(world: int, steps: int, every: int) -> Tensor:
    ranks = Ranks(world, steps)
    for step in range(1, steps + 1):
        ranks.backward()
        ranks.take_steps()
        if step % every == 0 or step == steps:
            ranks.everywhere(ranks.models.mean(0))
    return ranks.models[0]


def one_shot(world: int, steps: int) -> Tensor:
    return local_sgd(world, steps, every=steps)


def diloco(world: int, steps: int, every: int) -> Tensor:
    """The outer step is torch's own SGD with Nesterov momentum."""
    ranks = Ranks(world, steps)
    outer = nn.Parameter(ranks.models[0])
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, steps + 1):
        ranks.backward()
        ranks.take_steps()
        if step % every == 0 or step == steps:
            outer.grad = outer.detach() - ranks.models.mean(0)
            optimizer.step()
            ranks.everywhere(outer.detach())
    return ranks.models[0]


def sparta(world: int, steps: int, density: float) -> Tensor:
    ranks = Ranks(world, steps)
    for step in range(1, steps + 1):
        ranks.backward()
        ranks.take_steps()
        models = ranks.backwards(ranks.models)
        n = models.shape[1]
        picked = turn(n, max(1, int(density * n)), step - 1, models.device)
        models[:, picked] = models[:, picked].mean(0)
        ranks.write(ranks.forwards(models))
    return ranks.models.mean(0)


def one_bit(world: int, steps: int) -> Tensor:
    """Gradients; signs with a scale for at most 256 of a tensor, there and back; in the last step everything
    as it is."""
    ranks = Ranks(world, steps)
    n = ranks.models.shape[1]
    sizes = [p.numel() for p in reversed(list(ranks.trainings[0].model.parameters()))]
    errors = torch.zeros(world, n)
    for step in range(steps):
        ranks.backward()
        acc = errors + ranks.backwards(ranks.gradients)
        if step == steps - 1:
            mean = acc.mean(0)
        else:
            mean, errors = _rounded(acc, "sign", step, sizes)
        for training in ranks.trainings:
            parts = ranks.forwards(mean).split([p.numel() for p in training.model.parameters()])
            for parameter, part in zip(training.model.parameters(), parts, strict=True):
                parameter.grad = part.view_as(parameter).clone()
        ranks.take_steps()
    return ranks.models[0]


def _rounded(
    values: Tensor, kind: Values, step: int, sizes: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """The mean of the rows in few bits, there and back by way of owners; and what is left with each rank."""
    world, n = values.shape
    rows = block_layout(tuple(sizes or [n])).between(0, n).dealt(world, VALUE_CODECS[kind].bits)
    sent = torch.stack([_coded(own, rows, kind) for own in values])
    whole = sent.sum(0)
    total = _coded(whole, rows, kind)
    left = values - sent
    starts = [0, *accumulate(row.count for row in rows)]
    for owner in range(world):
        row = (owner + step) % world
        here = slice(starts[row], starts[row + 1])
        left[owner, here] -= (total - whole)[here]
    return total / world, left


def _coded(vector: Tensor, rows: Sequence[Blocks], kind: Values) -> Tensor:
    """As the codec has them, whose own tests say what they mean."""
    out = []
    for part, blocks in zip(vector.split([row.count for row in rows]), rows, strict=True):
        codec = VALUE_CODECS[kind].over(blocks)
        out.append(codec.decode(codec.encode(part.clone()), part.numel(), part.dtype))
    return torch.cat(out)


def streaming(world: int, steps: int, cut: int) -> Tensor:
    """Two fragments, up to `cut` and from there on, each every 4 steps; delay 1, alpha 0.5, 4 bits."""
    ranks = Ranks(world, steps)
    shared, velocity = ranks.models[0], torch.zeros_like(ranks.models[0])
    halves = slice(0, cut), slice(cut, None)

    def mixed(half: slice, mean: Tensor, alpha: float) -> None:
        velocity[half] = 0.9 * velocity[half] + mean
        shared[half] -= 0.4 * (mean + 0.9 * velocity[half])
        models = ranks.models
        models[:, half] = alpha * models[:, half] + (1 - alpha) * shared[half]
        ranks.write(models)

    pending = []
    for step in range(1, steps + 1):
        ranks.backward()
        ranks.take_steps()
        due, pending = pending, []
        for half, rest in zip(halves, (0, 2), strict=True):
            if step % 4 == rest:
                pending.append((half, _rounded((shared - ranks.models)[:, half], "int4", step)[0]))
        for half, mean in due:
            mixed(half, mean, 0.5)
    for half, mean in pending:
        mixed(half, mean, 0.5)
    for half in halves:
        mixed(half, _rounded((shared - ranks.models)[:, half], "int4", steps)[0], 0.0)
    return ranks.models[0]


def muloco(world: int, steps: int, every: int) -> Tensor:
    """Muon on the first matrix of two; error feedback that keeps 0.9."""
    ranks = Ranks(world, steps)
    shared, velocity = ranks.models[0], torch.zeros_like(ranks.models[0])
    errors, momenta = torch.zeros_like(ranks.models), [torch.tensor(0.0)] * world
    for step in range(1, steps + 1):
        ranks.backward()
        for rank, training in enumerate(ranks.trainings):
            matrix, group = next(training.model.parameters()), training.optimizer.param_groups[0]
            # As torch forms it, to the last bit: what follows is rounded to bfloat16.
            momenta[rank] = momenta[rank].expand_as(matrix).lerp(matrix.grad, 1 - 0.9)
            scale = 0.2 * math.sqrt(max(matrix.shape))
            matrix.data *= 1 - group["lr"] * group["weight_decay"]
            matrix.data.add_(_orthogonal(momenta[rank]), alpha=-group["lr"] * scale)
            matrix.grad = None
        ranks.take_steps()
        if step % every == 0 or step == steps:
            mean, left = _rounded(shared - ranks.models + errors, "int4", step)
            errors = 0.9 * left
            velocity = 0.9 * velocity + mean
            shared = shared - 0.8 * (mean + 0.9 * velocity)
            ranks.everywhere(shared)
    return ranks.models[0]


def _orthogonal(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz iterations, in bfloat16."""
    x = matrix.bfloat16()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def one_bit_adam(world: int, steps: int, warm: int) -> Tensor:
    ranks = Ranks(world, steps)
    w, group = ranks.models[0], ranks.trainings[0].optimizer.param_groups[0]
    m, v, errors = torch.zeros_like(w), torch.zeros_like(w), torch.zeros_like(ranks.models)
    for step in range(1, steps + 1):
        ranks.backward()
        if step <= warm:
            g = ranks.gradients.mean(0)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        else:
            m, errors = _rounded(0.9 * m + 0.1 * ranks.gradients + errors, "sign", step)
        root = (v / (1 - 0.999 ** min(step, warm))).sqrt() + 1e-8
        w = (1 - group["lr"] * group["weight_decay"]) * w
        w = w - torch.where(v > 0, group["lr"] * m / (1 - 0.9**step) / root, 0.0)
        ranks.everywhere(w)
        ranks.rest()
    return ranks.models[0]


def zero_one_adam(world: int, steps: int, warm: int, kappa: int, every: int, doubling: int) -> Tensor:
    ranks = Ranks(world, steps)
    w, group = ranks.models[0], ranks.trainings[0].optimizer.param_groups[0]
    v, formed, rates = torch.zeros_like(w), 0, 0.0
    m, u, errors = (
        torch.zeros_like(ranks.models),
        torch.zeros_like(ranks.models),
        torch.zeros_like(ranks.models),
    )
    for step in range(1, steps + 1):
        ranks.backward()
        g, rate = ranks.gradients, group["lr"]
        w = (1 - rate * group["weight_decay"]) * w
        if step <= warm:
            if step % 2 ** (formed // kappa) == 0:
                g, formed = g.mean(0), formed + 1
                v = 0.999 * v + 0.001 * g * g
            else:
                g, errors = _rounded(g + errors, "sign", step)
            m = 0.9 * m + 0.1 * g
        else:
            m = 0.9 * m + 0.1 * g
            u, rates = u + rate * m, rates + rate
        root = torch.where(v > 0, (v / (1 - 0.999**formed)).sqrt() + 1e-8, torch.inf)
        if step <= warm:
            w = w - rate * m[0] / (1 - 0.9**step) / root
            errors = errors if step < warm else torch.zeros_like(errors)
        elif step % min(every, 2 ** ((step - warm - 1) // doubling)) == 0 or step == steps:
            mean, errors = _rounded(u + errors, "sign", step)
            w, m = w - mean / root, (mean / rates).expand(world, -1)
            u, rates = torch.zeros_like(u), 0.0
        ranks.write(w - u / root)
        ranks.rest()
    return ranks.models[0]


def sparseloco(world: int, steps: int, every: int, chunk: int, k: int) -> Tensor:
    ranks = Ranks(world, steps)
    shared = ranks.models[0]
    errors = torch.zeros_like(ranks.models)
    for step in range(1, steps + 1):
        ranks.backward()
        ranks.take_steps()
        if step % every and step != steps:
            continue
        errors = 0.95 * errors + (shared - ranks.models)
        sent = torch.stack([_largest(row, chunk, k) for row in errors])
        errors -= sent
        shared = shared - sent.mean(0)
        ranks.everywhere(shared)
    return ranks.models[0]


def _largest(row: Tensor, chunk: int, k: int) -> Tensor:
    """Two bits a value, scales over 256 of those picked, chunk after chunk."""
    n = row.numel()
    padded = nn.functional.pad(row, (0, -n % chunk))
    places = []
    for start in range(0, padded.numel(), chunk):
        best = padded[start : start + chunk].abs().argsort(descending=True, stable=True)[:k]
        places.append(start + best.sort().values)
    where = torch.cat(places)
    codec = VALUE_CODECS["int2"]
    values = codec.decode(codec.encode(padded[where]), where.numel(), torch.float32)
    return torch.zeros_like(padded).index_copy(0, where, values)[:n]


def cser(
    world: int, steps: int, every: int, picked: Callable[[int, int, int], Tensor], r1: int, r2: int
) -> Tensor:
    """`picked(step, ratio, which)` marks the elements of the blocks that are drawn."""
    ranks = Ranks(world, steps)
    x = ranks.models
    e = torch.zeros_like(x)
    for step in range(1, steps + 1):
        ranks.backward()
        ranks.take_steps()
        p = x - ranks.models
        marks = picked(step, r2, 2)
        x = x - torch.where(marks, p.mean(0), p)
        e = e - torch.where(marks, 0.0, p)
        if step % every == 0:
            marks = picked(step, r1, 1)
            x = x - e + torch.where(marks, e.mean(0), e)
            e = torch.where(marks, 0.0, e)
        ranks.write(x)
    return x.mean(0)


def demo(world: int, steps: int, chunk: int, k: int) -> Tensor:
    ranks = Ranks(world, steps)
    momenta = [[torch.zeros_like(p) for p in one.model.parameters()] for one in ranks.trainings]
    for _ in range(steps):
        ranks.backward()
        group = ranks.trainings[0].optimizer.param_groups[0]
        rate, decay = group["lr"], group["weight_decay"]
        for number in range(len(momenta[0])):
            sent = []
            for rank, training in enumerate(ranks.trainings):
                gradient = list(training.model.parameters())[number].grad
                momenta[rank][number] = 0.999 * momenta[rank][number] + rate * gradient
                sent.append(_strongest(momenta[rank][number], chunk, k))
                momenta[rank][number] -= _back(sent[-1], chunk)
            for training in ranks.trainings:
                parameter = list(training.model.parameters())[number]
                every = torch.stack(sent)
                total = _back(every.sum(0) / (every != 0).sum(0).clamp_min(1), chunk)
                parameter.data = (1 - rate * decay) * parameter.data - rate * total.sign()
        ranks.rest()
    return ranks.models[0]


def _strongest(tensor: Tensor, chunk: int, k: int) -> Tensor:
    """Block by block, the k largest coefficients of its cosines, these as bfloat16."""

    def of(block: Tensor, down: Tensor, across: Tensor) -> Tensor:
        found = torch.einsum("ai,ij,bj->ab", down, block, across)
        keep = found.abs().flatten().argsort(descending=True)[:k]
        kept = torch.zeros(found.numel()).index_copy(0, keep, found.flatten()[keep].bfloat16().float())
        return kept.view_as(found)

    return _by_block(tensor, chunk, of)


def _back(tensor: Tensor, chunk: int) -> Tensor:
    return _by_block(tensor, chunk, partial(torch.einsum, "ab,ai,bj->ij"))


def _by_block(tensor: Tensor, chunk: int, of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    matrix = tensor if tensor.ndim == 2 else tensor[None]
    height, width = (max(d for d in range(1, chunk + 1) if side % d == 0) for side in matrix.shape)
    out = torch.zeros_like(matrix)
    for top in range(0, matrix.shape[0], height):
        for left in range(0, matrix.shape[1], width):
            here = slice(top, top + height), slice(left, left + width)
            out[here] = of(matrix[here], _basis(height), _basis(width))
    return out.view_as(tensor)


def _basis(n: int) -> Tensor:
    rows = []
    for frequency in range(n):
        scale = math.sqrt((1 if frequency == 0 else 2) / n)
        rows.append([scale * math.cos(math.pi * frequency * (2 * place + 1) / (2 * n)) for place in range(n)])
    return torch.tensor(rows)
