"""On a device that mixes with the CPU as little as a GPU does, trainings end with the CPU's bits.

The device is a mock: there is no GPU here (ADR 46).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradsieve
from accelerator import device as fake
from accelerator import trainings
from gradsieve.schemes import SCHEMES
from multiproc.harness import RankFailure, Ranks

KINDS: dict[str, dict[str, Any]] = {
    # Without noop: it exchanges nothing, so that ranks differ and cannot save.
    **{name: {"scheme": name} for name, kind in SCHEMES.items() if not kind.no_comm},
    "bits": {"bits": 0.75},
    "every third step": {"bits": 0.75, "exchange": gradsieve.Steps(every=3)},
    "behind two steps": {"bits": 0.75, "exchange": gradsieve.Steps(every=2, overlap=2)},
    "gradients": {"scheme": "exdyna", "density": 0.05, "exchange": gradsieve.Gradients()},
}
Bits = Sequence[dict[str, Tensor]]


def that_differ(ours: Bits, theirs: Bits) -> list[str]:
    return [
        f"rank {rank}: {name}"
        for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True))
        for name in mine.keys() | other.keys()
        if name not in mine or name not in other or not torch.equal(mine[name], other[name])
    ]


def resumed_otherwise(bits: Bits) -> list[str]:
    """What a resumed training has other than the one that went on."""
    return that_differ([_part(each, "trained/") for each in bits], [_part(each, "resumed/") for each in bits])


def _part(bits: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): each for name, each in bits.items() if name.startswith(prefix)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_exchange_ends_with_the_bits_of_the_cpu(
    two: Ranks, library: Path, tmp_path: Path, kind: str
) -> None:
    on = {name: two.run(trainings.ddp_life, name, library, tmp_path, KINDS[kind]) for name in ("cpu", "fake")}
    assert that_differ(on["cpu"], on["fake"]) == []
    assert resumed_otherwise(on["fake"]) == []


def test_hsdp_ends_with_the_bits_of_the_cpu(four: Ranks, library: Path, tmp_path: Path) -> None:
    on = {name: four.run(trainings.hsdp_life, name, library, tmp_path) for name in ("cpu", "fake")}
    assert that_differ(on["cpu"], on["fake"]) == []
    assert resumed_otherwise(on["fake"]) == []


def test_a_loop_of_ones_own_ends_with_the_bits_of_the_cpu(two: Ranks, library: Path, tmp_path: Path) -> None:
    on = {name: two.run(trainings.plain_life, name, library, tmp_path) for name in ("cpu", "fake")}
    assert that_differ(on["cpu"], on["fake"]) == []
    assert resumed_otherwise(on["fake"]) == []


def test_one_other_bit_is_seen() -> None:
    ours = {"trained/model": torch.ones(3), "resumed/model": torch.ones(3)}
    theirs = {**ours, "resumed/model": torch.tensor([1.0, 1.0, 1.0 + 2.0**-23])}
    assert that_differ([ours], [theirs]) == ["rank 0: resumed/model"]
    assert resumed_otherwise([ours]) == []
    assert resumed_otherwise([theirs]) == ["rank 0: model"]


def test_an_exchange_that_mixes_devices_fails(two: Ranks, library: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="same device"):
        two.run(trainings.mixing_life, library, tmp_path)


MIXED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda here, there: here + there,
    "add_": lambda here, there: there.add_(here),
    "cat": lambda here, there: torch.cat([here, there]),
    "dot": lambda here, there: here @ there,
    "where": lambda here, there: torch.where(here > 0, there, here),
    "gather": lambda here, there: here.gather(0, there.long()),
    "searchsorted": lambda here, there: torch.searchsorted(here, there),
    "foreach": lambda here, there: torch._foreach_add_([here], [there]),
    "out": lambda here, there: torch.add(here, here, out=there),
}


def mix(rank: int, library: Path) -> list[str]:
    """The operators that took tensors of the device and of the CPU together."""
    here, took = torch.arange(4.0, device=fake.load(library)), []
    for name, call in MIXED.items():
        try:
            call(here, torch.arange(4.0))
        except RuntimeError:
            continue
        took.append(name)
    call_alone = [call(here.clone(), here.clone()) for call in MIXED.values()]
    assert len(call_alone) == len(MIXED)  # each of them works on the device alone
    return took


def test_operators_that_mix_devices_fail(two: Ranks, library: Path) -> None:
    assert two.run(mix, library) == [[], []]
