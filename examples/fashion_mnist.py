"""Trains on Fashion-MNIST with sparse gradient exchange; on a network, then races it against dense.

torchrun --nproc-per-node 2 examples/fashion_mnist.py
gradsieve lab run --hosts 4 --rate 1gbit -- python examples/fashion_mnist.py
"""

import argparse
import gzip
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve

DATA = Path("/usr/share/datasets/fashion-mnist")
BATCH, RACES = 32, 30


def load(part, rank=0, world=1):
    if not DATA.is_dir():
        sys.exit(f"{DATA} is missing; to install it: apt-get install dataset-fashion-mnist")
    files = (gzip.decompress(path.read_bytes()) for path in sorted(DATA.glob(f"{part}-*.gz")))
    images, labels = (torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files)
    images = images[16:].view(-1, 1, 28, 28)[rank::world].float() / 255
    return (images - 0.286) / 0.353, labels[8:][rank::world].long()  # mean and deviation of the data set


def build(name):
    relu = nn.ReLU()
    if name == "mlp":
        wide = nn.Linear(784, 1024), relu, nn.Linear(1024, 1024), relu
        return nn.Sequential(nn.Flatten(), *wide, nn.Linear(1024, 10))
    first = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), relu, nn.MaxPool2d(2)
    second = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), relu, nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(1568, 1024), relu, nn.Linear(1024, 10))


def train(model, optimizer, images, labels):
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def timed(*args):
    dist.barrier()
    start = time.perf_counter()
    train(*args)
    dist.barrier()
    return 1000 * (time.perf_counter() - start)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--model", choices=["cnn", "mlp"], default="cnn")
parser.add_argument("--scheme", choices=list(gradsieve.schemes.SCHEMES), default="exdyna")
parser.add_argument("--density", type=float, default=0.01, help="share of the gradient sent in a step")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--lr", type=float, default=0.05)
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
is_loopback = os.environ.get("LOCAL_WORLD_SIZE") == str(world)
torch.manual_seed(rank)
images, labels = load("train", rank, world)
ddp, dense = (DistributedDataParallel(build(args.model)) for _ in range(2))
optimizer, dense_optimizer = (torch.optim.SGD(m.parameters(), args.lr, momentum=0.9) for m in (ddp, dense))
sync = gradsieve.attach(ddp, optimizer, scheme=args.scheme, density=args.density)
times, size = [], sum(p.numel() for p in dense.parameters())
for step in range(1, args.steps + (0 if is_loopback else RACES) + 1):
    pick = torch.randint(len(images), (BATCH,))
    batch = images[pick], labels[pick]
    if step > args.steps:  # one way, then the other: what else the machine does slows both alike
        times.append((timed(ddp, optimizer, *batch), timed(dense, dense_optimizer, *batch)))
        continue
    optimizer.param_groups[0]["lr"] = args.lr * (1 - step / (args.steps + 1))
    loss = train(ddp, optimizer, *batch)
    if step % 100 == 0 and rank == 0:
        print(f"step {step}: loss {loss:.3f}", flush=True)

last = sync.metrics()
sync.flush()  # at the end, on all ranks: what was not sent yet goes into the model
if rank == 0:
    images, labels = load("t10k")
    right = (ddp.module.eval().requires_grad_(False)(images).argmax(1) == labels).float().mean()
    print(f"test accuracy  {right:.4f} with density {last['density']:.4f} of {size:,} parameters")
    print(f"bytes sent     {last['bytes_sent']:,} a step and rank; dense {8 * size * (world - 1) // world:,}")
    if is_loopback:
        print("network        loopback, where plain DDP is as good; links: gradsieve lab run --rate 1gbit")
    else:
        ours, theirs = torch.tensor(times).median(0).values.tolist()
        print(f"a step         {ours:.1f} ms; dense {theirs:.1f} ms; {theirs / ours:.2f} times dense's speed")
dist.barrier(), dist.destroy_process_group()  # together: a message on its way would abort Python's end
