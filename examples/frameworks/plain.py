"""Fashion-MNIST with DistributedDataParallel and a loop of one's own; saved, and gone on from.

torchrun --nproc-per-node 4 examples/frameworks/plain.py /tmp/plain
torchrun --nproc-per-node 4 examples/frameworks/plain.py /tmp/plain --resume
"""

import contextlib

import task
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsieve


def main(words=None):
    args = task.arguments(words)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = task.Classifier()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), task.RATE, weight_decay=0)
    sync = gradsieve.attach(ddp, optimizer, **task.EXCHANGE)

    saved, begin, judged = args.folder / f"step-{args.save_at}", 0, {}
    if args.resume:
        model.load_state_dict(torch.load(saved / "model.pt", weights_only=True))
        sync.load(saved / "gradsieve")
        begin = args.save_at

    batches = list(torch.utils.data.DataLoader(task.training_data(args.steps), task.BATCH))
    for step in range(begin, args.steps):
        for micro in range(task.MICRO):
            is_last = micro == task.MICRO - 1
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                (ddp(*batches[step * task.MICRO + micro])["loss"] / task.MICRO).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == args.save_at:
            judged = {"saved_accuracy": task.accuracy(model), "saved_bits": task.bits(model)}
            sync.save(saved / "gradsieve")  # every rank
            if task.RANK == 0:
                torch.save(model.state_dict(), saved / "model.pt")

    sync.flush()
    task.report("plain", model, sync, **judged)
    sync.close()


if __name__ == "__main__":
    main()
    dist.barrier(), dist.destroy_process_group()
