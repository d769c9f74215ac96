"""Fashion-MNIST with Accelerate; saved by `save_state`, and gone on from by `load_state`.

torchrun --nproc-per-node 4 examples/frameworks/with_accelerate.py /tmp/accelerate
torchrun --nproc-per-node 4 examples/frameworks/with_accelerate.py /tmp/accelerate --resume
"""

import task
import torch
from accelerate import Accelerator, skip_first_batches

from gradsieve.frameworks.accelerate import attach


def main(words=None):
    args = task.arguments(words)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=task.MICRO)
    model = task.Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), task.RATE, weight_decay=0)
    batches = torch.utils.data.DataLoader(task.training_data(args.steps), task.BATCH)
    model, optimizer = accelerator.prepare(model, optimizer)
    sync = attach(accelerator, model, optimizer, **task.EXCHANGE)  # the one line

    saved, step = args.folder / f"step-{args.save_at}", 0
    if args.resume:
        accelerator.load_state(saved)
        step = args.save_at
        batches = skip_first_batches(batches, step * task.MICRO)

    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(*batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), task.CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            if step == args.save_at:
                accelerator.save_state(saved)

    sync.flush()
    task.report("accelerate", accelerator.unwrap_model(model), sync)
    sync.close()
    return accelerator


if __name__ == "__main__":
    main().end_training()
