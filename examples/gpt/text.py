"""The tokens that prepare.py has written, as a rank trains and is evaluated on them."""

import json

import numpy as np
import torch
import torch.distributed as dist

UNSEEN_WINDOWS, AT_ONCE = 256, 32


class Text:
    def __init__(self, folder, context, device):
        if not (folder / "text.json").is_file():
            raise SystemExit(f"{folder} has no tokens; to make them: python examples/gpt/prepare.py {folder}")
        self.facts = json.loads((folder / "text.json").read_text())
        self.seen, self.unseen = (
            np.memmap(folder / f"{part}.bin", "<u2", "r") for part in ("train", "unseen")
        )
        self.context, self.device = context, device

    def batch(self, seed, step, count):
        """By step and rank, so that a rank that was started again draws what it would have drawn."""
        source = np.random.default_rng([seed, step, dist.get_rank()])
        return self._windows(self.seen, source.integers(len(self.seen) - self.context, size=count))

    @torch.no_grad()
    def loss(self, model):
        """Of windows from all over the unseen files; each rank does its part of them."""
        starts = np.linspace(0, len(self.unseen) - self.context - 1, UNSEEN_WINDOWS).astype(np.int64)
        own = starts[dist.get_rank() :: dist.get_world_size()]
        total = torch.zeros((), device=self.device)
        model.eval()
        for begin in range(0, len(own), AT_ONCE):
            part = own[begin : begin + AT_ONCE]
            total += model(*self._windows(self.unseen, part)) * len(part)
        model.train()
        dist.all_reduce(total)
        return total.item() / UNSEEN_WINDOWS

    def _windows(self, tokens, starts):
        """Tokens, and for each the one that follows."""
        rows = np.stack([tokens[start : start + self.context + 1] for start in starts]).astype(np.int64)
        rows = torch.from_numpy(rows).to(self.device)
        return rows[:, :-1], rows[:, 1:]
