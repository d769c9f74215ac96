"""Trains a GPT on the text of prepare.py, on any number of ranks; README.md beside it says more.

torchrun --standalone --nproc-per-node 2 examples/gpt/train.py --text text --out run
torchrun --standalone --nproc-per-node 2 examples/gpt/train.py --text text --out run-dense --sync dense

Rank 0 prints a line of JSON an evaluation. A run that has a checkpoint goes on from there.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
from dense import Dense
from model import GPT, SIZES
from run import Run
from settings import parser, rate_at
from text import Text
from torch.nn.parallel import DistributedDataParallel

import gradsieve

DECAY, CLIP, BETAS = 0.1, 1.0, (0.9, 0.95)
UNTIMED = 3
"""Steps in which a process loads what it does only once: the clock starts after them."""


def sync_of(args):
    return {
        "auto": partial(gradsieve.attach, bits=args.bits),
        "dense": Dense,
    }[args.sync]


def main(args, attach, **ddp_settings):
    is_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if is_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    torch.manual_seed(args.seed)
    shape = SIZES[args.size]
    args.rate = args.rate or shape.rate
    text = Text(args.text, shape.context, device)
    model = GPT(shape, text.facts["symbols"]).to(device)
    optimizer = torch.optim.AdamW(model.decay_groups(DECAY), args.rate, BETAS)
    ddp = DistributedDataParallel(model, **ddp_settings)
    sync = attach(ddp, optimizer)
    recipe = {name: value for name, value in vars(args).items() if name not in ("out", "text")}
    run = Run(args.out, recipe | text.facts)
    narrow = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16 or is_cuda)

    def pause(step):
        run.stop_clock()
        with narrow:
            run.tell(step, text.loss(model))
        run.save(step, model, sync)
        run.start_clock()

    begin = run.resume(model, sync)
    if args.out:
        sync.heed_preemption()
    run.start_clock()
    for step in range(begin, args.steps):
        is_preempted = sync.is_preempted
        if is_preempted or (step > begin and step % args.evaluate_every == 0):
            pause(step)
        if is_preempted:
            raise SystemExit(os.EX_TEMPFAIL)  # with 0, torchrun would take the training for done
        if step == begin + UNTIMED:
            run.start_clock()
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, args)
        with narrow:
            loss = ddp(*text.batch(args.seed, step, args.batch))
        optimizer.zero_grad()
        loss.backward()
        sync.clip_grad_norm_(CLIP)
        optimizer.step()
    sync.flush()  # what was not sent yet goes into the model
    pause(args.steps)
    sync.close()
    dist.barrier(), dist.destroy_process_group()


if __name__ == "__main__":
    args = parser(__doc__).parse_args()
    main(args, sync_of(args))
