"""What each framework saved, taken into a plain model by whoever has no gradsieve."""

import sys

import task
import torch
from safetensors.torch import load_file


def model_saved_by(name, folder, step):
    """The model in the checkpoint of `step`."""
    if name == "plain":
        stored = torch.load(folder / f"step-{step}" / "model.pt", weights_only=True)
    elif name == "with_accelerate":
        stored = load_file(folder / f"step-{step}" / "model.safetensors")
    elif name == "with_lightning":
        stored = torch.load(folder / f"step={step}.ckpt", weights_only=True)["state_dict"]
    else:
        stored = load_file(folder / f"checkpoint-{step}" / "model.safetensors")
    model = task.Classifier()
    # Accelerate saves the wrapped model, Lightning the module that has it.
    stored = {key.removeprefix("module.").removeprefix("classifier."): part for key, part in stored.items()}
    model.load_state_dict(stored)
    assert "gradsieve" not in sys.modules
    return model
