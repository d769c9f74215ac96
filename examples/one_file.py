"""gradsieve in one file: the default exchange, for AdamW, DistributedDataParallel and gloo.

    torchrun --nproc-per-node 2 examples/one_file.py

Every rank's optimizer steps its own model, and a part of what its steps moved is exchanged, as signs:

    w   the shared model: the same bits on every rank
    x   the model that this rank trains: the memory of its parameters
    m   an anchor; e = m - x is the residual: what this rank's steps moved and it has not sent yet
    c   what e would be if this rank had moved as all ranks did in the mean; e - c is its own noise

The law: P w - (sum of e over ranks) is changed by the optimizers alone. Nothing is lost, whatever is rounded.
`tests/multiproc/test_one_file.py` holds this file to the library: the same losses.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BLOCK = 256  # elements with a scale of their own; no block spans two tensors
WINDOWS = 3  # of the vector: in each step, x is written anew in one of them


def encode(values: Tensor, lengths: Tensor, size: int) -> Tensor:
    """So many bytes: of each block the mean of |values| in 16 bits, and all signs.

    A sign has no zero. Of a block with some, the even or the odd elements are sent, in two bits each. The
    mean's sign bit says that it is such a block, and its last bit which elements."""
    there = torch.arange(BLOCK) < lengths[:, None]  # the others fill up short blocks
    blocks = torch.zeros(there.shape).masked_scatter_(there, values)
    sums = blocks.abs()
    while sums.shape[1] > 2:  # halves are added to each other: the same bits on every machine
        sums = torch.add(*sums.chunk(2, 1))
    pairs, odd = blocks.unflatten(1, (-1, 2)), (sums[:, 1] > sums[:, 0]).long()
    half = pairs.gather(2, odd[:, None, None].expand(-1, BLOCK // 2, 1))
    some_zero = (blocks != 0).any(1) & ((blocks == 0) & there).any(1)
    mean = torch.where(some_zero, sums.amax(1) / (half != 0).sum((1, 2)), sums.sum(1) / lengths)
    scales = mean.bfloat16().view(torch.int16)
    scales = torch.where(some_zero, (scales & ~1 | odd) | -0x8000, scales).to(torch.int16)
    signs = torch.where(some_zero[:, None], torch.cat([half != 0, half > 0], 2).flatten(1), blocks >= 0)
    data = torch.cat([scales.view(torch.uint8), torch.from_numpy(np.packbits(signs.numpy()))])
    return nn.functional.pad(data, (0, size - len(data)))


def decode(data: Tensor, lengths: Tensor) -> Tensor:
    scales = data[: 2 * len(lengths)].clone().view(torch.int16)
    signs = np.unpackbits(data[2 * len(lengths) :][: BLOCK // 8 * len(lengths)].numpy())
    first, second = torch.from_numpy(signs).view(-1, BLOCK // 2, 2).float().unbind(2)
    half, odd = first * (2 * second - 1), scales[:, None] & 1
    with_zeros = torch.stack([half * (1 - odd), half * odd], 2)
    blocks = torch.where((scales < 0)[:, None, None], with_zeros, 2 * torch.stack([first, second], 2) - 1)
    blocks = blocks.flatten(1) * (scales & 0x7FFF).view(torch.bfloat16)[:, None]
    return blocks[torch.arange(BLOCK) < lengths[:, None]]


class Coherence:
    """The part of a rank's vector v that all ranks have, P |mean v|^2 / sum of |v|^2, by a few elements."""

    alike = all = 0.0

    def look(self, total: Tensor, world: int, step: int) -> None:
        """Sums over ranks: of these elements, and last of their squares. An average over the last tenth."""
        past = 1 - 1 / min(max(25, step // 2 / 10), 500)
        self.alike = past * self.alike + float(total[:-1].double().square().sum()) / world
        self.all = past * self.all + float(total[-1])

    def share(self, world: int) -> float:
        return min(max(self.alike / self.all, 1 / world), 1.0) if self.all > 0 else 1.0


class Sync:
    def __init__(self, model: DistributedDataParallel, optimizer: torch.optim.AdamW, density: float) -> None:
        """`density`: part of the elements that is sent in a step; 0.3 is 0.65 bits a parameter."""
        self.optimizer, self.group = optimizer, dist.new_group(backend="gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.parameters = list(model.parameters())[::-1]  # as backward reaches them
        self.x = torch.cat([p.detach().flatten() for p in self.parameters])
        self.w, self.m, self.c, self.n = self.x.clone(), self.x.clone(), 0 * self.x, len(self.x)
        self.spans = list(pairwise([0, *np.cumsum([p.numel() for p in self.parameters]).tolist()]))
        for p, (start, stop) in zip(self.parameters, self.spans, strict=True):  # they become views of x
            p.data = self.x[start:stop].view_as(p)
        self.edges = [edge for span in self.spans for edge in range(*span, BLOCK)] + [self.n]
        self.k, self.step, self.cursor, self.ahead = max(1, int(density * self.n)), 0, 0, 0
        self.residuals, self.gradients = Coherence(), Coherence()
        self.noted = self.before = torch.zeros(0)
        self.thread, self.pending = ThreadPoolExecutor(1), Future[tuple[slice, Tensor, Tensor, Tensor]]()
        model.register_comm_hook(None, own_gradient)
        model.register_forward_pre_hook(lambda *_: self.begin() if torch.is_grad_enabled() else None)
        optimizer.register_step_pre_hook(lambda *_: self.before_step())
        optimizer.register_step_post_hook(lambda *_: self.after_step())

    # -- 1. Exchange, while forward and backward compute -----------------------------------------------------
    def begin(self) -> None:
        probe = self.noted if self.step % 2 else (self.m - self.x)[self.places()]  # these take turns
        self.pending = self.thread.submit(self.exchange, probe)

    def exchange(self, probe: Tensor) -> tuple[slice, Tensor, Tensor, Tensor]:
        """Sum one stretch over all ranks: each owns a row of it, adds it up and sends the sum to all."""
        first, last = self.stretch()
        here = slice(self.edges[first], self.edges[last])
        e = self.m[here] - self.x[here]
        # Rows have as many bytes as the others, or as near as whole blocks allow.
        lengths = torch.tensor(self.edges[first : last + 1]).diff()
        before = [0, *(2 + (lengths + 7) // 8).cumsum(0).tolist()]
        cuts = [nearest(before, before[-1] * row // self.world) for row in range(self.world + 1)]
        rows = [lengths[start:stop] for start, stop in pairwise(cuts)]
        size = (2 + BLOCK // 8) * max(map(len, rows))
        parts = zip(e.split([int(row.sum()) for row in rows]), rows, strict=True)
        codes = torch.stack([encode(part, row, size) for part, row in parts])
        turn = self.step % self.world  # of owners, and so of what their rounding leaves
        own = (self.rank + turn) % self.world
        dist.all_to_all_single(arrived := torch.empty_like(codes), codes.roll(-turn, 0), group=self.group)
        exact = sum((decode(code, rows[own]) for code in arrived[1:]), decode(arrived[0], rows[own]))
        rounded = encode(exact, rows[own], size)
        dist.all_gather(sums := [torch.empty_like(rounded) for _ in rows], rounded, group=self.group)
        total = torch.cat([decode(sums[row - turn], rows[row]) for row in range(self.world)])
        # Who rounds keeps the error: of its own values, and the owner that of the sum.
        spent = [decode(code, row) for code, row in zip(codes, rows, strict=True)]
        spent[own] += decode(rounded, rows[own]) - exact
        dist.all_reduce(probes := torch.cat([probe, probe.square().sum()[None]]), group=self.group)
        return here, total, torch.cat(spent), probes

    def stretch(self) -> tuple[int, int]:
        """From where the last one ended: whole blocks, as many for each owner, k elements in the long run."""
        first = self.edges.index(self.cursor)
        left, turns = len(self.edges) - 1 - first, max(1, (self.n - self.cursor + self.ahead) // self.k)
        number = max(1, nearest(self.edges, self.cursor - (self.cursor - self.n) // turns) - first)
        if self.world <= number < left:
            number = min(left, (number + self.world // 2) // self.world * self.world)
        return first, first + number

    def places(self) -> Tensor:
        """The elements that are looked at in this step: the same on all ranks."""
        count = min(256, max(16, self.n // 8192))
        return torch.from_numpy(np.sort(np.random.default_rng(self.step).integers(self.n, size=count)))

    # -- 2. Apply and rebase, before the optimizer steps -----------------------------------------------------
    def before_step(self) -> None:
        here, total, spent, probes = self.pending.result()
        (self.gradients if self.step % 2 else self.residuals).look(probes, self.world, self.step)
        self.m[here] = self.x[here] + ((self.m[here] - self.x[here]) - spent)
        self.w[here] -= total / self.world
        self.c[here] += total / self.world - spent
        self.rebase(here)
        if len(total) * WINDOWS < self.n:
            self.rebase(slice(*(self.n * (self.step % WINDOWS + end) // WINDOWS for end in (0, 1))))
        turns = max(1, round(3 * len(total) / self.n))  # in a single step there is more rounding than noise
        if self.step * len(total) // self.n % turns == turns - 1:
            self.take_noise_out(here)
        self.ahead = min(self.n, max(-self.k, self.ahead + len(total) - self.k))
        self.cursor, self.step = here.stop % self.n, self.step + 1
        self.noted = torch.cat([p.grad.flatten() for p in self.parameters])[self.places()]
        self.before = self.x.clone()

    def rebase(self, here: slice) -> None:
        """x = w - a e, and e stays. The preview a: what of this rank's residual the others have as well."""
        e = self.m[here] - self.x[here]
        self.x[here] = self.w[here] - self.residuals.share(self.world) * e
        self.m[here] = self.x[here] + e

    def take_noise_out(self, here: slice) -> None:
        """Momentum goes on for ten steps where this rank's own batches led it. It is made to lead less in the
        direction of what this rank moved and the others did not."""
        noise = self.m[here] - self.x[here] - self.c[here]
        self.c[here] += noise
        for p, (first, last) in zip(self.parameters, self.spans, strict=True):
            start, stop = max(first, here.start), min(last, here.stop)
            if stop - start >= 64 and (state := self.optimizer.state[p]):  # fewer say too little
                m, v = (state[k].flatten()[start - first : stop - first] for k in ("exp_avg", "exp_avg_sq"))
                d, scale = noise[start - here.start : stop - here.start], v.sqrt() + 1e-8
                m -= 0.75 * ((m / scale) @ d / (d @ d)).clamp_min(0).nan_to_num(0) * scale * d

    # -- 3. Make the step longer, after the optimizer has taken it -------------------------------------------
    def after_step(self) -> None:
        """Adam divides by gradients that have the noise of this rank's batch in them. A mean over ranks has
        less, so that its steps are longer. Weight decay, which divides by nothing, is left as it is."""
        group, rho = self.optimizer.param_groups[0], self.gradients.share(self.world)
        self.x.lerp_(self.before * (1 - group["lr"] * group["weight_decay"]), 1 - rho**-0.5)

    def flush(self) -> None:
        """Send all residuals as they are, after the last step. Then every rank has the same model."""
        e = self.m - self.x
        dist.all_reduce(e, group=self.group)
        self.m[:] = self.x[:] = self.w[:] = self.w - e / self.world


def nearest(edges: list[int], place: int) -> int:
    return min(range(len(edges)), key=lambda at: abs(edges[at] - place))


def own_gradient(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP averages nothing: each rank keeps its own gradient."""
    (future := torch.futures.Future[Tensor]()).set_result(bucket.buffer())
    return future


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sync = Sync(model, optimizer, density=0.3)
    torch.manual_seed(sync.rank)  # every rank has its own data
    for _ in range(200):
        inputs = torch.randn(32, 64)
        loss = (model(inputs) - inputs.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {sync.rank}: loss {loss.item():.4f} in the end")
    sync.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
