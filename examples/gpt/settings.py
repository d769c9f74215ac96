"""What a training can be told, and the learning rate that follows from it."""

import argparse
import math
from pathlib import Path

from model import SIZES


def parser(description, syncs=("auto", "dense")):
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    add = made.add_argument
    add("--text", type=Path, required=True, help="folder that prepare.py has written")
    add("--out", type=Path, help="folder for the log and checkpoints, which all ranks see")
    add("--size", choices=SIZES, default="1M")
    add("--sync", choices=syncs, default="auto", help="auto: gradsieve; dense: plain DDP")
    add("--bits", type=float, help="of auto, a parameter and step: the same run again gives the same bits")
    add("--steps", type=int, default=2000)
    add("--batch", type=int, default=8, help="windows of a rank in a step")
    add("--rate", type=float, help="the highest learning rate (default: the size's)")
    add("--warm-up", type=int, default=100, help="steps in which the rate rises")
    add("--floor", type=float, default=0.1, help="share of the rate at the end; 1: it does not fall")
    add("--evaluate-every", type=int, default=100, help="steps; each time a checkpoint is saved too")
    add("--bf16", action="store_true", help="autocast on a CPU too")
    add("--seed", type=int, default=0)
    return made


def rate_at(step, args):
    """Up in a line, then down along a cosine to the floor."""
    if step < args.warm_up:
        return args.rate * (step + 1) / args.warm_up
    way = (step - args.warm_up) / max(1, args.steps - args.warm_up)
    return args.rate * (args.floor + (1 - args.floor) * (1 + math.cos(math.pi * way)) / 2)
