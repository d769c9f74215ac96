"""The rows of `compat.py`: optimizers, each with a rate near the one that is best for plain DDP.

Of other packages, into an environment of their own, without a second torch:

    pip install --no-deps lion-pytorch schedulefree bitsandbytes torchao pytorch_optimizer
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

Parameters = list[nn.Parameter]


@dataclass(frozen=True)
class Row:
    """One optimizer."""

    name: str
    make: Callable[[Parameters], Any]
    package: str | None = None
    """As pip calls it, if it is not torch's own or written here."""
    network: str = "mlp"
    """Which of the networks in `compat_cells` it trains."""
    takes_closure: bool = False
    schedule: bool = True
    """Whether its rate falls in stages: not where that makes no sense or torch's schedulers refuse it."""

    @property
    def title(self) -> str:
        """With the package's version."""
        if self.package is None or not self.is_installed:
            return self.name
        return f"{self.name} ({self.package} {metadata.version(self.package)})"

    @property
    def is_installed(self) -> bool:
        if self.package is None:
            return True
        try:
            metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return False
        return True


class MasterSGD(torch.optim.Optimizer):
    """SGD whose weights are float32 copies in its state: parameters are their rounding to bfloat16."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if "master" not in state:
                        state["master"] = parameter.detach().float().clone()
                    state["master"].sub_(parameter.grad.float(), alpha=group["lr"])
                    parameter.copy_(state["master"])

    def load_state_dict(self, state_dict: Any) -> None:
        """torch's own would round the copies to the type of the parameters."""
        super().load_state_dict(state_dict)
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, stored in state_dict["state"].items():
            self.state[every[place]]["master"] = stored["master"].float().clone()


class Own:
    """An optimizer that is none of torch's: it has groups, `step` and `zero_grad`, and no hooks."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        self.param_groups = [{"params": list(params), "lr": lr}]

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = stored["lr"]


def of_torch(kind: str, **settings: Any) -> Callable[[Parameters], Any]:
    return lambda parameters: getattr(torch.optim, kind)(parameters, **settings)


def of(module: str, kind: str, **settings: Any) -> Callable[[Parameters], Any]:
    """Of another package, imported where it is needed."""
    return lambda parameters: getattr(importlib.import_module(module), kind)(parameters, **settings)


def tensor_rate(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), weight_decay=0.01)


_ADAMW = {"lr": 1e-2, "weight_decay": 0.01}

_ALL = (
    Row("sgd", of_torch("SGD", lr=2.0)),
    Row("sgd-nesterov", of_torch("SGD", lr=0.3, momentum=0.9, nesterov=True, weight_decay=1e-4)),
    Row("adam", of_torch("Adam", lr=1e-2)),
    Row("adamw", of_torch("AdamW", **_ADAMW)),
    Row("adamw-fused", of_torch("AdamW", fused=True, **_ADAMW)),
    Row("adamw-foreach", of_torch("AdamW", foreach=True, **_ADAMW)),
    Row("adamw-capturable", of_torch("AdamW", capturable=True, **_ADAMW)),
    Row("adamw-amsgrad", of_torch("AdamW", amsgrad=True, **_ADAMW)),
    Row("adamw-tensor-lr", tensor_rate),
    Row("nadam", of_torch("NAdam", lr=1e-2)),
    Row("radam", of_torch("RAdam", lr=2e-2)),
    Row("adagrad", of_torch("Adagrad", lr=3e-2)),
    Row("adadelta", of_torch("Adadelta", lr=3.0)),
    Row("adamax", of_torch("Adamax", lr=1e-2)),
    Row("rmsprop", of_torch("RMSprop", lr=2e-3)),
    Row("rprop", of_torch("Rprop", lr=1e-3), schedule=False),
    Row("asgd", of_torch("ASGD", lr=2.0)),
    Row("adafactor", of_torch("Adafactor", lr=3e-2)),
    Row("muon", of_torch("Muon", lr=2e-2), network="mlp without bias"),
    Row("lion", of("lion_pytorch", "Lion", lr=4e-3, weight_decay=0.01), "lion-pytorch"),
    Row("sgd-schedulefree", of("schedulefree", "SGDScheduleFree", lr=2.0), "schedulefree", schedule=False),
    Row(
        "adamw-schedulefree", of("schedulefree", "AdamWScheduleFree", lr=1e-2), "schedulefree", schedule=False
    ),
    Row("adam8bit-bnb", of("bitsandbytes.optim", "Adam8bit", lr=1e-2), "bitsandbytes"),
    Row("adamw8bit-torchao", of("torchao.optim", "AdamW8bit", **_ADAMW), "torchao"),
    Row("lamb", of("pytorch_optimizer", "Lamb", lr=1e-2), "pytorch_optimizer"),
    Row("adabelief", of("pytorch_optimizer", "AdaBelief", lr=5e-3), "pytorch_optimizer"),
    Row("prodigy", of("pytorch_optimizer", "Prodigy", lr=1.0), "pytorch_optimizer"),
    Row("soap", of("pytorch_optimizer", "SOAP", lr=5e-3), "pytorch_optimizer"),
    Row("sgd-master", lambda parameters: MasterSGD(parameters, lr=2.0), network="mlp in bfloat16"),
    Row("own", lambda parameters: Own(parameters, lr=2.0), schedule=False),
    Row("lbfgs", of_torch("LBFGS", lr=0.1, max_iter=4, history_size=5), takes_closure=True),
    Row("sparse-adam", of_torch("SparseAdam", lr=0.1), network="tables"),
)
ROWS = {row.name: row for row in _ALL}
