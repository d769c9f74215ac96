"""Where collectives return before they are done, links are timed to the end of what was sent: virtual ranks,
a virtual clock, and ops that behave as an accelerator's, queued at once and paid for when the host looks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gradsieve.comm import links, lockstep
from gradsieve.comm.ops import Meter, Op
from gradsieve.types import Ctx, to_host

WORLD, BYTES_A_SECOND, LAUNCH, LATENCY = 2, 125e6, 20e-6, 50e-6


def measured(monkeypatch: pytest.MonkeyPatch, waits: bool) -> links.Links:
    now = owed = 0.0
    perform = lockstep._perform

    def queue(ops: list[Op]) -> object:
        nonlocal now, owed
        meter = Meter(0, len(ops))
        meter.count(ops[0])
        now, owed = now + LAUNCH, owed + LATENCY + meter.moved / BYTES_A_SECOND
        return perform(ops)

    def look(tensor: torch.Tensor) -> object:
        nonlocal now, owed
        now, owed = now + owed, 0.0
        return to_host(tensor)

    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(links, "to_host", look if waits else to_host)
    monkeypatch.setattr(lockstep, "_perform", queue)
    ranks = [links.measure_links(Ctx(rank, WORLD, 0), torch.device("cpu")) for rank in range(WORLD)]
    return lockstep.run(ranks)[0]


def test_links_are_timed_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, waits=True).word == pytest.approx(4 / BYTES_A_SECOND, rel=0.1)
