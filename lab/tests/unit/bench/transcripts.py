"""Each rival once more, in a straight line: all ranks' models as rows of one matrix, no engine, no messages.

Every function trains the tiny task and returns the model that rank 0 has at the end, laid end to end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from gradsieve.kernels.blocks import Blocks, block_layout
from gradsieve.schemes.baselines.randomk import turn
from gradsieve.wire.values import VALUE_CODECS
from gradsieve_lab.bench.common.virtual import own_batches
from gradsieve_lab.bench.tasks import training as tasks
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
    rows = block_layout(tuple(sizes)).between(0, n).dealt(world, 1)
    errors = torch.zeros(world, n)
    for step in range(steps):
        ranks.backward()
        grads = [torch.cat([p.grad.flatten() for p in one.model.parameters()]) for one in ranks.trainings]
        acc = errors + ranks.backwards(torch.stack(grads))
        if step == steps - 1:
            total = acc.sum(0)
        else:
            sent = torch.stack([_signs(own, rows) for own in acc])
            whole = sent.sum(0)
            total = _signs(whole, rows)
            errors = acc - sent
            starts = [0, *accumulate(row.count for row in rows)]
            for owner in range(world):
                row = (owner + step) % world
                here = slice(starts[row], starts[row + 1])
                errors[owner, here] -= (total - whole)[here]
        for training in ranks.trainings:
            mean = ranks.forwards(total / world)
            sizes = [p.numel() for p in training.model.parameters()]
            for parameter, part in zip(training.model.parameters(), mean.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter).clone()
        ranks.take_steps()
    return ranks.models[0]


def _signs(vector: Tensor, rows: Sequence[Blocks]) -> Tensor:
    """As the codec has them, whose own tests say what they mean."""
    out = []
    for part, blocks in zip(vector.split([row.count for row in rows]), rows, strict=True):
        codec = VALUE_CODECS["sign"].over(blocks)
        out.append(codec.decode(codec.encode(part.clone()), part.numel(), part.dtype))
    return torch.cat(out)


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
                momenta[rank][number] -= sent[-1]
            for training in ranks.trainings:
                parameter = list(training.model.parameters())[number]
                total = torch.stack(sent).sum(0) / world
                parameter.data = (1 - rate * decay) * parameter.data - rate * total.sign()
        for training in ranks.trainings:
            training.optimizer.zero_grad()
        ranks.take_steps()
    return ranks.models[0]


def _strongest(tensor: Tensor, chunk: int, k: int) -> Tensor:
    """Block by block, the sum of cosines with the k largest coefficients, these as bfloat16."""
    matrix = tensor if tensor.ndim == 2 else tensor[None]
    height, width = (max(d for d in range(1, chunk + 1) if side % d == 0) for side in matrix.shape)
    down, across = _basis(height), _basis(width)
    out = torch.zeros_like(matrix)
    for top in range(0, matrix.shape[0], height):
        for left in range(0, matrix.shape[1], width):
            block = matrix[top : top + height, left : left + width]
            found = torch.einsum("ai,ij,bj->ab", down, block, across)
            keep = found.abs().flatten().argsort(descending=True)[:k]
            kept = torch.zeros(found.numel()).index_copy(0, keep, found.flatten()[keep].bfloat16().float())
            back = torch.einsum("ab,ai,bj->ij", kept.view_as(found), down, across)
            out[top : top + height, left : left + width] = back
    return out.view_as(tensor)


def _basis(n: int) -> Tensor:
    rows = []
    for frequency in range(n):
        scale = math.sqrt((1 if frequency == 0 else 2) / n)
        rows.append([scale * math.cos(math.pi * frequency * (2 * place + 1) / (2 * n)) for place in range(n)])
    return torch.tensor(rows)
