"""Fashion-MNIST with transformers' Trainer; saved in its `checkpoint-N`, and gone on from.

torchrun --nproc-per-node 4 examples/frameworks/with_trainer.py /tmp/trainer
torchrun --nproc-per-node 4 examples/frameworks/with_trainer.py /tmp/trainer --resume
"""

import task
import torch
from transformers import Trainer, TrainingArguments

from gradsieve.frameworks.trainer import attach


class Rows(torch.utils.data.Dataset):
    """The Trainer gives batch i to rank i mod P; so that each rank finds its own there."""

    def __init__(self, mine):
        self.mine = mine

    def __len__(self):
        return len(self.mine) * task.WORLD

    def __getitem__(self, number):
        batch, place = divmod(number, task.BATCH)
        images, labels = self.mine[batch // task.WORLD * task.BATCH + place]
        return {"images": images, "labels": labels}


def main(words=None):
    args = task.arguments(words)
    settings = TrainingArguments(
        args.folder,
        max_steps=args.steps,
        per_device_train_batch_size=task.BATCH,
        gradient_accumulation_steps=task.MICRO,
        max_grad_norm=task.CLIP,
        learning_rate=task.RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        train_sampling_strategy="sequential",
        save_steps=args.save_at,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    model = task.Classifier()
    trainer = Trainer(model, settings, train_dataset=Rows(task.training_data(args.steps)))
    gradsieve = attach(trainer, **task.EXCHANGE)  # the one line
    trainer.train(str(args.folder / f"checkpoint-{args.save_at}") if args.resume else None)
    task.report("trainer", model, gradsieve.sync)


if __name__ == "__main__":
    main()
    torch.distributed.barrier(), torch.distributed.destroy_process_group()
