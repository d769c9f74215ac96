"""What the four trainings have in common: images, model, settings, and how they are judged."""

import argparse
import gzip
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

DATA = Path("/usr/share/datasets/fashion-mnist")
BATCH, MICRO, RATE, CLIP = 32, 2, 1e-3, 1.0  # a step is two batches of 32 on each rank
EXCHANGE = {"bits": 0.75}  # the same bits in every run
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def load(part):
    if not DATA.is_dir():
        sys.exit(f"{DATA} is missing; to install it: apt-get install dataset-fashion-mnist")
    files = (gzip.decompress(path.read_bytes()) for path in sorted(DATA.glob(f"{part}-*.gz")))
    images, labels = (torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files)
    return (images[16:].view(-1, 784).float() / 255 - 0.286) / 0.353, labels[8:].long()


class Classifier(nn.Module):
    """Gives its loss, as models for transformers' Trainer do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images, labels):
        scores = self.net(images)
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


def training_data(steps):
    """As many images as this rank needs, in its order."""
    images, labels = load("train")
    pick = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    mine = pick[RANK::WORLD][: steps * MICRO * BATCH]
    return torch.utils.data.TensorDataset(images[mine], labels[mine])


def accuracy(model):
    images, labels = load("t10k")
    model.eval()
    with torch.no_grad():
        right = model(images, labels)["scores"].argmax(1) == labels
    model.train()
    return right.float().mean().item()


def arguments(words=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="for checkpoints; all ranks have to see it")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save-at", type=int, default=25)
    parser.add_argument("--resume", action="store_true", help="from what was saved then")
    return parser.parse_args(words)


def bits(model):
    """The same for the same bits in all parameters."""
    parts = (parameter.detach().contiguous().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(b"".join(parts)).hexdigest()


def report(name, model, sync, **more):
    """How it ended on this rank; in one piece, since all ranks write to one pipe."""
    end = {"name": name, "rank": RANK, "exchanges": sync.pipeline.step, "accuracy": accuracy(model), **more}
    end["bits"] = bits(model)
    os.write(1, f"{json.dumps(end)}\n".encode())
