"""Trains a small GPT-2 with transformers' Trainer on the sources of Python's standard library.

torchrun --nproc-per-node 2 examples/gpt2_trainer.py
torchrun --nproc-per-node 4 examples/gpt2_trainer.py --every 10

Nothing is downloaded: the model is GPT2LMHeadModel from a config, its symbols are bytes. It prints the loss
as it falls and the bits a parameter that the last exchange moved, a step; a dense all-reduce moves 32 on 2
ranks and 48 on 4. At the end the model that all ranks share is judged on files that were not trained on.
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, ProgressCallback, Trainer, TrainerCallback
from transformers import TrainingArguments as Settings

from gradsieve import Steps
from gradsieve.frameworks.trainer import attach

CONTEXT = 64
UNSEEN = 5
"""One file in so many is kept for evaluation."""


class Windows(torch.utils.data.Dataset):
    """Stretches of CONTEXT bytes, end to end."""

    def __init__(self, paths, most):
        text = b"".join(path.read_bytes() for path in paths)[: most * CONTEXT]
        whole = len(text) // CONTEXT * CONTEXT
        self.rows = torch.frombuffer(bytearray(text[:whole]), dtype=torch.uint8).view(-1, CONTEXT).long()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


class Lines(TrainerCallback):
    """What the Trainer logs, and beside it what the exchange took."""

    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero and "loss" in logs:
            bits = gradsieve.sync.metrics()["bits"]
            print(f"step {state.global_step}: loss {logs['loss']:.3f}, {bits:.2f} bits", flush=True)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--bits", type=float, default=0.75, help="a parameter and step, to move at most")
parser.add_argument("--every", type=int, default=1, help="steps to an exchange")
parser.add_argument("--folder", default=tempfile.gettempdir() + "/gpt2", help="for checkpoints")
args = parser.parse_args()
settings = Settings(
    args.folder,
    max_steps=args.steps,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=64,
    learning_rate=3e-3,
    warmup_steps=args.steps // 10,
    lr_scheduler_type="cosine",
    logging_steps=max(1, args.steps // 10),
    save_strategy="no",
    report_to="none",
    ddp_find_unused_parameters=False,
    use_cpu=True,
    seed=1,
)
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
seen = [path for number, path in enumerate(files) if number % UNSEEN]
torch.manual_seed(0)
shape = {"n_positions": CONTEXT, "n_embd": 128, "n_layer": 2, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **shape))
trainer = Trainer(
    model,
    settings,
    train_dataset=Windows(seen, 100_000),
    eval_dataset=Windows(files[::UNSEEN], 512),
    callbacks=[Lines()],
)
trainer.remove_callback(ProgressCallback)  # it writes the same once more
gradsieve = attach(trainer, bits=args.bits, exchange=Steps(every=args.every))  # the one line

if trainer.is_world_process_zero():
    print(f"{model.num_parameters():,} parameters, {len(trainer.train_dataset):,} windows of {CONTEXT} bytes")
trainer.train()
judged = trainer.evaluate()["eval_loss"]
if trainer.is_world_process_zero():
    print(f"loss on unseen files {judged:.3f}, with {args.bits:g} bits a parameter and step at most")
torch.distributed.barrier(), torch.distributed.destroy_process_group()  # together: see fashion_mnist.py
