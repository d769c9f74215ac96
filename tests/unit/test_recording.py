"""Records: a line says what happened, what cannot be a record is refused, and it costs next to nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsieve
from gradsieve.errors import ConfigError, Malformed
from gradsieve.recording import Recorder
from gradsieve_tools.bench.accuracy import measure as accuracy
from gradsieve_tools.bench.common import virtual
from gradsieve_tools.records import Header, Line, Record, path_of, read, text_of
from gradsieve_tools.specs import parse
from gradsieve_tools.specs import parse_exchange as treatment
from tiny_task import TASK, tiny

__all__ = ["tiny"]

HEADER = Header(
    name="a", scheme="exdyna", exchange="steps", density=0.1, rank=0, world=2, parameters=9, every=50
)
LINES = [
    Line(step=1, at=0.5, density=0.1, bits=1.5, seconds={"select": 0.25}, loss=2.0),
    Line(step=2, at=1.0, density=0.125, bits=1.5, threshold=3.0, cut=0.0),
]


def run(sync: str, how: str, steps: int = 6, **more: Any) -> virtual.Run:
    scheme = parse(sync, None if sync == "dense" else 0.1)
    return virtual.Run(TASK, scheme, treatment(how, scheme), seed=0, world=3, steps=steps, batch=15, **more)


# -- what a line says -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny")
def test_a_training_leaves_a_file_a_rank_and_a_line_a_step(tmp_path: Path) -> None:
    case = accuracy.Case(task=TASK, sync="exdyna", density=0.1, world=4, steps=50)
    accuracy.train(case, lambda: None, tmp_path)
    found = [read(path_of(tmp_path / case.stem, rank)) for rank in range(4)]
    assert [record.header.rank for record in found] == [0, 1, 2, 3]
    for record in found:
        *lines, flush = record.lines
        assert [line.step for line in lines] == list(range(1, 51))
        assert all(line.loss is not None and line.threshold is not None for line in lines)
        assert lines[0].imbalance is None, "nothing waits before the first step, so nothing is selected"
        assert all(line.imbalance is not None and line.imbalance >= 1.0 for line in lines[1:])
        assert {"select", "exchange"} <= set(lines[-1].seconds)
        assert (lines[-1].xi is not None, lines[-2].xi) == (True, None), "norms are for some steps only"
        assert (flush.density, flush.threshold) == (1.0, None)
    assert accuracy.missing([case], tmp_path, tmp_path) == [case], "recorded, but the training was not kept"


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_sync_is_recorded_until_it_is_closed(tmp_path: Path) -> None:
    model = nn.Linear(40, 60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradsieve.GradientSync(model.named_parameters(), optimizer, scheme="exdyna", density=0.1)
    recorder = gradsieve.record(sync, tmp_path / "new" / "run", every=2)
    with pytest.raises(ConfigError, match="recorded already"):
        gradsieve.record(sync, tmp_path / "other")
    for step in range(3):
        model(torch.randn(5, 40)).square().mean().backward()
        sync.reduce()
        optimizer.step()
        recorder.note_loss(float(step))
    sync.close()
    found = read(tmp_path / "new" / "run.rank0.jsonl")
    assert [line.loss for line in found.lines] == [0.0, 1.0, 2.0]
    assert [line.waiting is None for line in found.lines] == [True, False, True]


@pytest.mark.usefixtures("tiny")
def test_a_checkpoint_that_is_loaded_on_the_way_begins_another_life(tmp_path: Path) -> None:
    members = [virtual.Member(run("exdyna", "default"), rank) for rank in range(3)]
    recorder = Recorder(members[0].pipeline, tmp_path / "run")
    for step in (1, 2, 3, 2, 3):
        for member in members:
            member.pipeline.step = step - 1
        virtual.exchange(members)
        recorder.note_loss(float(step))
    recorder.close()
    assert [line.step for line in read(recorder.path).lines] == [1, 2, 3]
    assert recorder.path.read_text().count("gradsieve_record") == 2


# -- what is read -----------------------------------------------------------------------------------------


def written(tmp_path: Path, texts: list[str]) -> Path:
    path = tmp_path / "x.rank0.jsonl"
    path.write_text("".join(texts))
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, [text_of(HEADER), *map(text_of, LINES)])
    assert read(path) == Record(HEADER, LINES)
    assert read(path).column("threshold") == ([2], [3.0])


def changed(entry: Header | Line, change: Callable[[dict[str, Any]], Any]) -> str:
    plain = json.loads(text_of(entry))
    change(plain)
    return json.dumps(plain) + "\n"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "empty"),
        ([text_of(HEADER)[:-9]], "cut off"),
        ([text_of(HEADER), text_of(LINES[0])[:-9] + "\n", text_of(LINES[1])], "line 2: not as a record"),
        (["not JSON\n"], "no record of a training"),
        ([changed(HEADER, lambda it: it.update(gradsieve_record=2))], "version 2"),
        ([changed(HEADER, lambda it: it.update(world="2"))], "world is '2'"),
        ([text_of(HEADER), changed(LINES[0], lambda it: it.update(more=1))], "line 2: .* more"),
        ([text_of(HEADER), changed(LINES[0], lambda it: it.update(density=float("nan")))], "density is nan"),
        ([text_of(HEADER), changed(LINES[0], lambda it: it.update(seconds={"a": "b"}))], "seconds is"),
        ([text_of(HEADER), *map(text_of, LINES[::-1])], "does not come after"),
    ],
)
def test_what_is_no_record_is_refused(texts: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(Malformed, match=said):
        read(written(tmp_path, texts))
