"""No two streams, threads or messages touch the same memory without an order between them: found by
happens-before, on a fake device. There is no GPU here; what this cannot show is in ADR 46."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gradsieve
from accelerator.faults import FAULTS
from accelerator.trainings import recorded_hsdp_life, recorded_life
from multiproc.harness import Ranks

STEPS: dict[str, Any] = {"density": 0.05}
GRADIENTS: dict[str, Any] = {"scheme": "exdyna", "density": 0.05, "exchange": gradsieve.Gradients()}
KINDS: dict[str, dict[str, Any]] = {
    "steps": STEPS,
    "steps, a budget of bits": {"bits": 0.75},
    "steps, messages from rank to rank": {"scheme": "oktopk"},
    "steps, every third": {**STEPS, "exchange": gradsieve.Steps(every=3)},
    "steps, behind two of three": {**STEPS, "exchange": gradsieve.Steps(every=3, overlap=2)},
    "gradients": GRADIENTS,
    "gradients, dense": {"scheme": "dense"},
}
SEEN = 1000
"""Pieces of work at least: a trace in which little happened proves nothing."""
# Where gradients are exchanged there is one model, and nothing is switched.
OF_GRADIENTS = [fault for fault in FAULTS if "switch" not in fault]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_races(two: Ranks, library: Path, tmp_path: Path, kind: str) -> None:
    for pieces, races in two.run(recorded_life, library, tmp_path, KINDS[kind]):
        assert pieces > SEEN
        assert races == []


def test_nothing_races_in_hsdp(four: Ranks, library: Path, tmp_path: Path) -> None:
    for pieces, races in four.run(recorded_hsdp_life, library, tmp_path):
        assert pieces > SEEN
        assert races == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(two: Ranks, library: Path, tmp_path: Path, fault: str) -> None:
    assert all(races for _, races in two.run(recorded_life, library, tmp_path, STEPS, fault))


@pytest.mark.parametrize("fault", OF_GRADIENTS)
def test_each_fault_is_found_with_gradients(two: Ranks, library: Path, tmp_path: Path, fault: str) -> None:
    assert all(races for _, races in two.run(recorded_life, library, tmp_path, GRADIENTS, fault))


def test_a_fault_is_found_in_hsdp(four: Ranks, library: Path, tmp_path: Path) -> None:
    assert all(races for _, races in four.run(recorded_hsdp_life, library, tmp_path, "no event"))
