"""Inside torchft, with a real lighthouse and real signals: what a death costs, and what a stop does not."""

from __future__ import annotations

import logging
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradsieve.errors import ConfigError, GradsieveError, Malformed, PeerError
from gradsieve.frameworks.torchft import ElasticSync, Rendezvous, adapter
from gradsieve_tools.bench.elastic import measure as elastic
from gradsieve_tools.bench.elastic.replica import Plan


def trained(steps: int, faults: elastic.Faults) -> dict[str, Any]:
    plan = Plan("transformer", 3, steps, {"bits": 1.0}, 0, deadline=3.0, least=1, evaluated=False)
    row = elastic.measure(plan, faults)
    assert row["alike"], "replicas ended with different models"
    return row


def test_a_death_costs_an_exchange_and_what_waited_there_is_told() -> None:
    row = trained(6, elastic.Faults(kill_every=3))
    assert row["kills"] == 1
    assert row["replicas_missing"] == 1
    [loss] = row["losses"]
    assert loss["name"] == "1.0"
    assert 2 <= loss["exchange"] <= 4, "it made exchanges 0 to 2, and perhaps the one in which it was killed"
    assert row["lost_mass"] == pytest.approx(loss["waiting"])
    assert row["lost_mass"] > 0.01


@pytest.mark.nightly
def test_one_that_is_stopped_is_not_waited_for_and_loses_nothing() -> None:
    """Longer than torchft waits for a heartbeat; it is back before the others are done."""
    row = trained(11, elastic.Faults(stop_every=6, stop_seconds=0.8))
    assert (row["stops"], row["back"]) == (1, 1)
    assert (row["replicas_missing"], row["lost_mass"]) == (0, 0)


# -- the lighthouse ---------------------------------------------------------------------------------------


class Lighthouse:
    """One that goes dark in a step of the training, and comes back with nothing that it knew."""

    def __init__(self, least: int, dark_at: int, seconds: float) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._least, self._dark_at, self._seconds = least, dark_at, seconds
        self._process = elastic.start_lighthouse(least, self._port)
        self._step = 0
        self._timer: threading.Timer | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def advance(self, steps: int) -> None:
        self._step += steps
        if self._step >= self._dark_at and self._timer is None:
            self._process.kill()
            self._process.wait()
            self._timer = threading.Timer(self._seconds, self._back)
            self._timer.start()

    def _back(self) -> None:
        self._process = elastic.start_lighthouse(self._least, self._port)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.join()
        self._process.kill()
        self._process.wait()


def trained_through_the_dark(
    folder: Path, faults: elastic.Faults, seconds: float, **more: Any
) -> dict[str, Any]:
    plan = Plan("transformer", 3, 14, {"bits": 1.0}, 0, deadline=5.0, least=2, evaluated=False, **more)
    lighthouse = Lighthouse(plan.least, 9, seconds)
    try:
        return elastic.Campaign(plan, faults, lighthouse.address, folder).run(lighthouse.advance)
    finally:
        lighthouse.end()


@pytest.mark.nightly
def test_a_lighthouse_that_is_gone_for_a_while_is_waited_for(tmp_path: Path) -> None:
    """After a death: its quorums are counted from 1 again, by which replicas have met before."""
    row = trained_through_the_dark(tmp_path, elastic.Faults(kill_every=4), 7.0)
    assert row["alike"]
    said = (tmp_path / "replica0.0").read_text()
    assert "It waits up to 60 s (the manager's quorum_timeout) for the lighthouse" in said
    logs = [log.read_text() for log in tmp_path.glob("replica*")]
    assert not any("members of quorum 1 found no" in log for log in logs)


class Manager:
    """torchft's, as far as a sync asks it before it has met anybody."""

    _use_async_quorum = False
    _quorum_timeout = timedelta(seconds=9)

    def __init__(self, retries: int = 3) -> None:
        self._quorum_retries = retries

    def register_state_dict_fn(self, *_: object) -> None: ...

    def current_step(self) -> int:
        return 7

    def start_quorum(self, **_: object) -> None:
        time.sleep(0.5)
        raise TimeoutError("Timeout expired")


def sync_of(manager: Manager) -> ElasticSync:
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ElasticSync(manager, Rendezvous(), model.named_parameters(), optimizer, name="x", bits=1.0)


def test_a_quorum_that_does_not_come_is_told_on_the_way_and_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_PATIENCE", 0.1)
    with pytest.raises(GradsieveError, match=r"replica x, exchange 7: no quorum within 9 s.*\(now 3\)"):
        sync_of(Manager()).reduce()
    assert [text.count("no quorum for") for text in caplog.messages] == [1], "after 0.1 s"


def test_a_manager_that_does_not_ask_again_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gradsieve"):
        sync_of(Manager())
        assert caplog.messages == []
        sync_of(Manager(retries=0))
    assert "quorum_retries=300" in caplog.text


# -- checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_replicas_that_all_end_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    def life(steps: int, number: int) -> tuple[dict[str, Any], list[int]]:
        told: list[int] = []
        plan = Plan(
            *("transformer", 2, steps, {"bits": 1.0}, 0),
            deadline=10.0,
            least=2,
            evaluated=False,
            folder=str(tmp_path / "saved"),
            save_every=3,
        )
        (tmp_path / f"life{number}").mkdir()
        with elastic.lighthouse(2) as address:
            campaign = elastic.Campaign(plan, elastic.Faults(), address, tmp_path / f"life{number}")
            return campaign.run(told.append), told

    first, told = life(4, 0)
    assert (first["alike"], told[0]) == (True, 1)
    again, told = life(7, 1)
    assert (again["alike"], told[0]) == (True, 3), "it goes on from step 3, and not from the beginning"
    assert again["replicas_missing"] == 0


def test_what_cannot_be_saved_or_loaded_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = sync_of(Manager())
    with pytest.raises(ConfigError, match="nothing to save before reduce"):
        sync.save(tmp_path)
    with pytest.raises(Malformed, match="cannot be read"):
        sync.load(tmp_path)

    class Dying:
        def save(self, _: Path) -> None:
            raise PeerError("rank 1 is gone")

    monkeypatch.setattr(sync._replica, "sync", Dying())
    assert sync.save(tmp_path) is False
    assert "no checkpoint of exchange 7 was saved, the one before is as it was: rank 1 is gone" in caplog.text
    with pytest.raises(ConfigError, match="before the first reduce"):
        sync.load(tmp_path)
    monkeypatch.setattr(sync, "_is_met", True)
    caplog.clear()
    assert sync.save(tmp_path) is False
    assert caplog.messages == [], "it owes the others an exchange, and they do not save now"
