"""Fashion-MNIST with Lightning; saved by its ModelCheckpoint, and gone on from by `ckpt_path`.

torchrun --nproc-per-node 4 examples/frameworks/with_lightning.py /tmp/lightning
torchrun --nproc-per-node 4 examples/frameworks/with_lightning.py /tmp/lightning --resume
"""

import lightning
import task
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from gradsieve.frameworks.lightning import GradsieveStrategy


class Learner(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.classifier = task.Classifier()

    def training_step(self, batch):
        return self.classifier(*batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), task.RATE, weight_decay=0)


class Batches:
    """Lightning saves and loads the state of a loader that has one; else it begins at the first batch."""

    def __init__(self, data):
        self.all, self.next = list(torch.utils.data.DataLoader(data, task.BATCH)), 0

    def __len__(self):
        return len(self.all)

    def __iter__(self):
        while self.next < len(self.all):
            self.next += 1
            yield self.all[self.next - 1]
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def main(words=None):
    args = task.arguments(words)
    strategy = GradsieveStrategy(process_group_backend="gloo", **task.EXCHANGE)  # in the place of "ddp"
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=task.WORLD,
        max_steps=args.steps,
        accumulate_grad_batches=task.MICRO,
        gradient_clip_val=task.CLIP,
        callbacks=[ModelCheckpoint(args.folder, "{step}", every_n_train_steps=args.save_at, save_top_k=-1)],
        use_distributed_sampler=False,  # each rank has its own images
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    learner = Learner()
    batches = Batches(task.training_data(args.steps))
    saved = args.folder / f"step={args.save_at}.ckpt"
    trainer.fit(learner, batches, ckpt_path=saved if args.resume else None, weights_only=True)
    task.report("lightning", learner.classifier, strategy.sync)


if __name__ == "__main__":
    main()
    torch.distributed.barrier(), torch.distributed.destroy_process_group()
