"""Plain DDP, with what the loop asks of a sync."""

import json
import signal

import torch
import torch.distributed as dist
from torch import nn


class Dense:
    def __init__(self, ddp, optimizer):
        self.ddp, self.optimizer = ddp, optimizer
        self.is_heeding = self.has_notice = False
        self.vote = None

    def clip_grad_norm_(self, most):
        return nn.utils.clip_grad_norm_(self.ddp.parameters(), most)

    def heed_preemption(self):
        self.is_heeding = True
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._notice)

    def _notice(self, *_):
        self.has_notice = True

    @property
    def is_preempted(self):
        """To be asked once a step, on all ranks. A vote is on its way while a step is computed: nobody waits
        for it, and all learn of a notice before the same step."""
        if not self.is_heeding:
            return False
        last, flag = self.vote, torch.tensor(float(self.has_notice), device=self.ddp.device)
        self.vote = flag, dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True)
        if last is None:
            return False
        last[1].wait()
        return bool(last[0])

    def save(self, folder):
        """All ranks have the same optimizer: rank 0's is enough."""
        if dist.get_rank() == 0:
            torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
            (folder / "manifest.part").write_text(json.dumps({"sync": "dense"}))
            (folder / "manifest.part").replace(folder / "manifest.json")
        dist.barrier()  # nobody leaves before it is written

    def load(self, folder):
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))

    def flush(self):
        """Nothing waits here."""

    def close(self):
        if self.vote is not None:
            self.vote[1].wait()
