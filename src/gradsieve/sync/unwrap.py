"""What frameworks put around models and optimizers, taken off: `attach` wants what is inside.

Optimizers are known by their module and not by having an `.optimizer`: one that adds a rule of its own to
another's (Lookahead) has that too, and taken off, its state would not be saved.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gradsieve.torch_names import compiled_from

_FRAMEWORKS = frozenset({"accelerate", "lightning", "pytorch_lightning", "lightning_fabric"})


def model_in(model: Any) -> Any:
    """What `torch.compile` was given."""
    while isinstance(model, nn.Module) and (inner := compiled_from(model)) is not None:
        model = inner
    return model


def optimizer_in(optimizer: Any) -> Any:
    """The optimizer that steps."""
    while type(optimizer).__module__.partition(".")[0] in _FRAMEWORKS and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
