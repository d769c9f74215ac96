"""Trains one language model at two sites that a slow, distant link joins: one exchange in H steps, hidden.

gradsieve lab run --hosts 4 --rate 50mbit --delay 20ms -- python examples/two_sites.py
torchrun --nproc-per-node 4 examples/two_sites.py            (no network: to see that it runs)

The first half of the ranks is one site, the second the other. The lab's links are all alike here; with links
of their own for each host, those inside of a site could be fast: nothing in this file would change.

A step's work is waited for (--step-ms), as for an accelerator: the hosts of a lab share one machine's cores.
First each rank trains alone, which is as fast as it goes; then dense over the link; then with gradsieve. It
prints seconds a step of each, the loss, and the bits a parameter and step that went over a rank's link.
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve

CONTEXT, BATCH, ALONE, DENSE = 16, 32, 10, 3


class NextByte(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.symbols = nn.Embedding(256, 32)
        self.body = nn.Sequential(nn.Linear(32 * CONTEXT, width), nn.ReLU(), nn.Linear(width, 256))

    def forward(self, text):
        time.sleep(args.step_ms / 1000)
        return self.body(self.symbols(text).flatten(1))


def text_of(rank, world):
    """This rank's part of the sources of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[rank::world]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def step(model, optimizer):
    """One training step on windows of this rank's text; the loss."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
    rows = text[starts + torch.arange(CONTEXT + 1)].long()
    loss = nn.functional.cross_entropy(model(rows[:, :CONTEXT]), rows[:, CONTEXT])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def seconds(model, steps):
    """A step, of a model that is thrown away."""
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step(model, optimizer)
    return (time.perf_counter() - start) / steps


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--every", type=int, default=30, help="steps to an exchange")
parser.add_argument("--overlap", type=int, default=10, help="steps that an exchange may take")
parser.add_argument("--bits", type=float, default=0.06, help="a parameter and step")
parser.add_argument("--step-ms", type=float, default=50)
parser.add_argument("--lr", type=float, default=3e-3)
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
text = text_of(rank, world)
torch.manual_seed(rank)
alone = seconds(NextByte(), ALONE)
dense = seconds(DistributedDataParallel(NextByte()), DENSE)

ddp = DistributedDataParallel(NextByte())
optimizer = torch.optim.AdamW(ddp.parameters(), args.lr)
exchange = gradsieve.Steps(every=args.every, overlap=args.overlap)
sync = gradsieve.attach(ddp, optimizer, bits=args.bits, exchange=exchange)  # the one new line
losses, start = [], time.perf_counter()
for number in range(1, args.steps + 1):
    losses.append(step(ddp, optimizer))
    if number % args.every == 0:
        mean, losses = sum(losses) / len(losses), []
        if rank in (0, world // 2):  # the first of each site
            print(f"site {2 * rank // world}, step {number}: loss {mean:.3f}", flush=True)
ours, bits = (time.perf_counter() - start) / args.steps, sync.metrics()["bits"]
sync.flush()  # at the end, on all ranks: what still waits, in one dense exchange; one model, bit for bit
if rank == 0:
    print(f"a step     {1e3 * ours:.0f} ms; alone {1e3 * alone:.0f}, dense {1e3 * dense:.0f}")
    print(f"bits       {bits:.3f} a parameter and step; dense {64 * (world - 1) / world:g}")
sync.close(), dist.barrier(), dist.destroy_process_group()
