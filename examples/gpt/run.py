"""A run: its clock, its lines of JSON, and its checkpoints, one folder a step."""

import json
import shutil
import time

import torch
import torch.distributed as dist


class Run:
    """Without a folder nothing is kept: lines are printed, that is all."""

    def __init__(self, folder, recipe):
        self.folder, self.recipe, self.seconds = folder, recipe, 0.0

    def resume(self, model, sync):
        """The step to go on with: that of the last whole checkpoint, if there is one."""
        whole = [path.parent for path in self.folder.glob("step-*/manifest.json")] if self.folder else []
        if not whole:
            return 0
        newest = max(whole, key=lambda path: path.name)
        facts = json.loads((newest / "facts.json").read_text())
        asked, was = self.recipe, facts["recipe"]
        other = [name for name in {**was, **asked} if was.get(name) != asked.get(name)]
        if other:
            other = ", ".join(f"{name} {was.get(name)}, not {asked.get(name)}" for name in other)
            raise SystemExit(f"{newest} was trained with {other}: give the same, or another --out")
        model.load_state_dict(torch.load(newest / "model.pt", weights_only=True))
        sync.load(newest)
        self.seconds = facts["seconds"]
        return facts["step"]

    def start_clock(self):
        dist.barrier()
        self.started = time.perf_counter() - self.seconds

    def stop_clock(self):
        """Seconds are those in which all ranks train."""
        dist.barrier()
        self.seconds = time.perf_counter() - self.started

    def tell(self, step, loss):
        if dist.get_rank() == 0:
            line = json.dumps({"step": step, "seconds": round(self.seconds, 3), "loss": loss})
            print(line, flush=True)
            if self.folder:
                self.folder.mkdir(parents=True, exist_ok=True)
                with (self.folder / "log.jsonl").open("a") as log:
                    log.write(line + "\n")

    def save(self, step, model, sync):
        """On all ranks. `sync.save` writes the manifest, last: where it is, all else is."""
        if not self.folder:
            return
        folder = self.folder / f"step-{step:06}"
        if dist.get_rank() == 0:
            folder.mkdir(exist_ok=True)
            torch.save(model.state_dict(), folder / "model.pt")
            facts = {"recipe": self.recipe, "step": step, "seconds": self.seconds}
            (folder / "facts.json").write_text(json.dumps(facts))
        dist.barrier()  # the folder is there for all
        sync.save(folder)
        if dist.get_rank() == 0:
            for old in sorted(self.folder.glob("step-*"))[:-2]:
                shutil.rmtree(old)
