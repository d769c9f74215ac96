"""Trains through deaths and preemptions: torchrun starts all ranks again, from the last checkpoint.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/restarts.py run
torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/restarts.py run2 --die-at 25

With --die-at the last rank kills itself once, and both commands print the same digest: no bit is lost.
On several nodes: docs/checkpoints.md
"""

import argparse
import os
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve


def batch(step, rank):
    """By step and rank, so that a rank that was started again draws what it would have drawn."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(32, 64, generator=source)
    return inputs, inputs[:, :8].argmax(1)


def last_checkpoint(run):
    """One is whole once its manifest is there; its step is in its name."""
    whole = [path.parent for path in run.glob("step-*/manifest.json")]
    return max(whole, key=lambda path: path.name, default=None)


def save(run, step, model, sync):
    folder = run / f"step-{step:06}"
    folder.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:  # first: when the manifest is there, this is
        torch.save(model.state_dict(), folder / "model.pt")
    sync.save(folder)
    if dist.get_rank() == 0:
        for old in sorted(run.glob("step-*"))[:-2]:
            shutil.rmtree(old)


def main(run, steps=40, save_every=10, die_at=None, step_seconds=0.0):
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # One store for all restarts: ranks would look for each other where the dead have been.
        raise SystemExit("start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    run, rank, world = Path(run), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    # A fixed budget: one that follows the clock would not send the same again.
    sync = gradsieve.attach(ddp, optimizer, bits=1.0)
    sync.heed_preemption()
    begin, folder = 0, last_checkpoint(run)
    if folder is not None:
        model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        sync.load(folder)
        begin = int(folder.name.removeprefix("step-"))
    print(f"rank {rank} of {world} begins with step {begin}", flush=True)
    for step in range(begin, steps):
        if step > begin and (sync.is_preempted or step % save_every == 0):
            save(run, step, model, sync)
        if sync.is_preempted:
            raise SystemExit(os.EX_TEMPFAIL)  # with 0, torchrun would take the training for done
        if step == die_at and rank == world - 1 and begin == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, labels = batch(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), labels)
        loss.backward()
        optimizer.step()
        time.sleep(step_seconds)
    sync.flush()
    bits = torch.cat([p.detach().flatten() for p in model.parameters()]).view(torch.int32)
    words = f"steps {begin} to {steps}, loss {loss.item():.4f}, digest {int(bits.long().sum()):x}"
    sync.close()
    dist.barrier(), dist.destroy_process_group()
    return words


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", help="a folder that all ranks see")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--die-at", type=int, help="step before which the last rank kills itself, once")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="to sleep in every step")
    words = main(**vars(parser.parse_args()))
    print(f"rank {os.environ['RANK']}: {words}", flush=True)
