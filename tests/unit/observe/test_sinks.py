"""Sinks: what they export is what the record says, under names that the dashboard queries; a sink that fails
costs no training."""

from __future__ import annotations

import json
import logging
import re
import socket
import urllib.request
from collections import Counter
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradsieve.comm.meter import Meter
from gradsieve.errors import ConfigError
from gradsieve.observe.recorder import Recorder
from gradsieve.observe.records import Header, Line, read
from gradsieve.observe.sinks import FIGURES, Sink, replay
from gradsieve.observe.sinks import prometheus as prometheus_sink
from gradsieve.observe.sinks import tensorboard as tensorboard_sink
from gradsieve.observe.sinks.otel import OpenTelemetry
from gradsieve.observe.sinks.prometheus import METRICS, Prometheus
from gradsieve.observe.sinks.tensorboard import TAGS, TensorBoard
from gradsieve.pipeline.base import Stats
from gradsieve.pipeline.exchange_settings import Steps
from gradsieve.schemes.exdyna import ExDyna
from unit.recorded import HEADER, line_of, write

STEPS = 12
DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "gradsieve.json"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write(tmp_path / "rec", steps=STEPS, header=replace(HEADER, period=2))[1]


def totals(path: Path) -> dict[str, float]:
    """As the record has them."""
    header, lines = (record := read(path)).header, record.lines
    seconds = Counter[str]()
    for line in lines:
        seconds.update(line.seconds)
    moved = sum(line.bits for line in lines) * header.parameters * 2 / 8
    return {"bytes": moved, "exchanges": len(lines), "recorded": lines[-1].at, **seconds}


def last(path: Path, field: str) -> float | None:
    known = [value for line in read(path).lines if (value := getattr(line, field)) is not None]
    return known[-1] if known else None


def test_every_figure_of_a_line_has_its_name() -> None:
    numbers = {field.name for field in fields(Line)} - {"at", "seconds"}
    assert {figure.field for figure in FIGURES} == numbers
    assert TAGS.keys() == numbers - {"step"}


def test_prometheus_exports_the_record(recorded: Path) -> None:
    sink = Prometheus(port=None)
    replay(recorded, sink)
    own, total = {"run": "run", "rank": "1"}, totals(recorded)

    def value(name: str, **more: str) -> float | None:
        found: float | None = sink.registry.get_sample_value(f"gradsieve_{name}", {**own, **more})
        return found

    for figure in FIGURES:
        assert value(figure.metric) == last(recorded, figure.field), figure
    assert value("exchange_bytes_total") == pytest.approx(total["bytes"])
    assert value("exchanges_total") == total["exchanges"]
    assert value("recorded_seconds_total") == pytest.approx(total["recorded"])
    for stage in ("select", "exchange", "waiting"):
        assert value("stage_seconds_total", stage=stage) == pytest.approx(total[stage])
    assert (value("world_size"), value("parameters"), value("target_density_ratio")) == (3, 1000, 0.01)
    assert value("run_info", scheme="topk", exchange="steps") == 1
    exported = {sample.name for metric in sink.registry.collect() for sample in metric.samples}
    assert {name for name in exported if not name.endswith("_created")} <= METRICS


def test_prometheus_is_served_on_this_host_until_it_is_closed(recorded: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="cannot be served"),
    ):
        Prometheus(port=taken.getsockname()[1] - HEADER.rank).begin(HEADER)
    sink = Prometheus(port=0)
    sink.begin(HEADER)
    sink.take(line_of(5))
    place = f"http://127.0.0.1:{sink.port}/metrics"
    with urllib.request.urlopen(place, timeout=5) as answer:
        assert 'gradsieve_waiting_age_steps{rank="0",run="run"} 12.0' in answer.read().decode()
    sink.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(place, timeout=5)
    with pytest.raises(ConfigError, match="already"):
        Prometheus(port=None, registry=sink.registry)


def test_opentelemetry_exports_the_record(recorded: Path) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    replay(recorded, OpenTelemetry(provider))
    exported = reader.get_metrics_data()
    assert exported is not None
    metrics = {m.name: m for m in exported.resource_metrics[0].scope_metrics[0].metrics}
    provider.shutdown()

    def value(name: str, stage: str | None = None) -> float | None:
        points = metrics[name].data.data_points if name in metrics else []
        found = [p.value for p in points if p.attributes.get("gradsieve.stage") == stage]
        assert all(p.attributes["gradsieve.rank"] == 1 for p in points)
        return found[0] if found else None

    total = totals(recorded)
    for figure in FIGURES:
        assert value(f"gradsieve.{figure.dotted}") == last(recorded, figure.field), figure
    assert value("gradsieve.exchange.io") == pytest.approx(total["bytes"])
    assert value("gradsieve.exchange.count") == total["exchanges"]
    assert value("gradsieve.recorded.time") == pytest.approx(total["recorded"])
    assert value("gradsieve.stage.time", "exchange") == pytest.approx(total["exchange"])
    units = {name: metric.unit for name, metric in metrics.items()}
    assert (units["gradsieve.exchange.io"], units["gradsieve.stage.time"]) == ("By", "s")


def test_tensorboard_exports_the_record(recorded: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    replay(recorded, TensorBoard(tmp_path / "tb", every=1))
    events = EventAccumulator(str(tmp_path / "tb" / "run" / "rank1")).Reload()
    lines = read(recorded).lines

    def scalars(tag: str) -> list[tuple[int, float]]:
        return [(each.step, each.value) for each in events.Scalars(tag)]

    for field, tag in TAGS.items():
        told = [(line.step, value) for line in lines if (value := getattr(line, field)) is not None]
        if told:
            assert scalars(tag) == [(step, pytest.approx(value)) for step, value in told], tag
    assert scalars("seconds/stage exchange")[-1] == (STEPS, pytest.approx(lines[-1].seconds["exchange"]))
    assert scalars("seconds/whole step")[-1] == (STEPS, pytest.approx(0.05)), "two steps for an exchange"
    (layout,) = events.Tensors("custom_scalars__config__")
    pages = Layout.FromString(layout.tensor_proto.string_val[0])
    tags = events.Tags()["scalars"]
    charts = [chart for page in pages.category for chart in page.chart]
    assert len(charts) == sum(map(len, tensorboard_sink.LAYOUT.values()))
    for chart in charts:
        assert any(re.search(tag, own) for tag in chart.multiline.tag for own in tags), chart.title


def test_tensorboard_takes_some_lines_and_all_norms(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path, every=4)
    sink.begin(HEADER)
    taken: list[int] = []
    sink._writer.add_scalar = lambda tag, value, step, at: taken.append(step)  # type: ignore[method-assign]
    for step in range(1, 11):
        sink.take(line_of(step))
    sink.close()
    assert sorted(set(taken)) == [4, 5, 8, 10]


@pytest.mark.parametrize("module", ["tensorboard", "prometheus_client", "opentelemetry"])
def test_a_sink_without_its_package_names_the_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    monkeypatch.setattr(tensorboard_sink.importlib.util, "find_spec", lambda name: None)
    make = {"tensorboard": lambda: TensorBoard("x"), "prometheus_client": Prometheus}
    with pytest.raises(ConfigError, match=r"pip install 'gradsieve\["):
        make.get(module, OpenTelemetry)()


# -- at the recorder ---------------------------------------------------------------------------------------


class Kept:
    """What a sink is told."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.told = fails, list[Any]()

    def begin(self, header: Header) -> None:
        self._tell("begin", header)

    def take(self, line: Line) -> None:
        self._tell("take", deepcopy(line))

    def close(self) -> None:
        self._tell("close", None)

    def _tell(self, call: str, what: Any) -> None:
        if call == self.fails:
            raise OSError("no route")
        self.told.append(what)


@pytest.fixture
def pipeline() -> Any:
    """What a recorder looks at, of a pipeline that sends nothing."""
    return SimpleNamespace(
        observer=None, rank=0, world=2, units=[SimpleNamespace(n=100)], scheme=ExDyna(density=0.1),
        exchanges_steps=True, parameters=100, settings=Steps(every=3), step=0,
        stats=Stats(Meter(0, 2)), outcomes=[],
        budget=None, bits=lambda: 1.5,
    )  # fmt: skip


def test_sinks_are_told_what_the_file_says(
    pipeline: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad, unclosed = Kept(), Kept("take"), Kept("close")
    sinks: list[Sink] = [bad, good, unclosed]
    recorder = Recorder(pipeline, tmp_path / "run", sinks=sinks)
    with caplog.at_level(logging.WARNING, "gradsieve"):
        for step in (1, 2, 3):
            pipeline.step = step
            recorder.after_step()
            recorder.note_loss(0.5 * step)
        recorder.close()
    record = read(recorder.path)
    assert good.told[0] == record.header
    assert record.header.period == 3
    told = [(line.step, line.loss, line.bits) for line in good.told[1:-1]]
    assert told == [(line.step, line.loss, line.bits) for line in record.lines]
    assert told == [(1, 0.5, 1.5), (2, 1.0, 1.5), (3, 1.5, 1.5)]
    assert good.told[-1] is None
    assert len(bad.told) == 1, "only begun"
    assert [text for text in caplog.messages if "Kept" in text] == [
        "rank 0: Kept takes no more lines: OSError('no route')",
        "rank 0: Kept was not closed: OSError('no route')",
    ]


def test_a_sink_that_cannot_begin_stops_the_recorder(pipeline: Any, tmp_path: Path) -> None:
    first = Kept()
    with pytest.raises(OSError, match="no route"):
        Recorder(pipeline, tmp_path / "run", sinks=[first, Kept("begin")])
    assert first.told[-1] is None, "it is closed again"
    assert pipeline.observer is None


# -- the dashboard -----------------------------------------------------------------------------------------


def faults(board: dict[str, Any]) -> list[str]:
    """What Grafana would not show."""
    found = []
    variables = {each["name"]: each["type"] for each in board["templating"]["list"]}
    if variables.get("datasource") != "datasource":
        found.append("no variable for the data source")
    if not isinstance(board.get("schemaVersion"), int) or not board.get("title") or not board.get("uid"):
        found.append("no schemaVersion, title or uid")
    cells = Counter[tuple[int, int]]()
    for panel in board["panels"]:
        name, at = panel["title"], panel["gridPos"]
        cells.update(
            (x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
        )
        if at["x"] + at["w"] > 24:
            found.append(f"{name} is wider than the page")
        if panel["type"] == "row":
            continue
        refs = [target["refId"] for target in panel["targets"]]
        if not refs or len(set(refs)) < len(refs):
            found.append(f"{name} has no queries, or two of one name")
        for source in [panel["datasource"], *(target["datasource"] for target in panel["targets"])]:
            if source != {"type": "prometheus", "uid": "${datasource}"}:
                found.append(f"{name} has a data source of its own")
        for target in panel["targets"]:
            found += [
                f"{name} has no ${each}" for each in _used(target["expr"]) - {*variables, "__rate_interval"}
            ]
    if len({panel["id"] for panel in board["panels"]}) < len(board["panels"]):
        found.append("two panels of one id")
    return found + ["panels overlap"] * (cells.most_common(1)[0][1] > 1)


def _used(query: str) -> set[str]:
    return set(re.findall(r"\$(\w+)", query))


def queried(board: dict[str, Any]) -> set[str]:
    return set(re.findall(r"gradsieve_\w+", json.dumps(board)))


def test_the_dashboard_is_whole_and_queries_only_what_is_exported() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert faults(board) == []
    assert queried(board) <= METRICS
    assert len(queried(board)) > 12
    counters = {f"gradsieve_{name}" for name in prometheus_sink.COUNTERS}
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            for name in queried(target) & counters:
                assert f"rate({name}" in target["expr"], "a counter is shown by its rate"


def test_a_broken_dashboard_is_seen() -> None:
    board = json.loads(DASHBOARD.read_text())
    chart = next(panel for panel in board["panels"] if panel["type"] == "timeseries")
    chart["gridPos"]["y"] = 0
    chart["targets"][0]["expr"] = 'gradsieve_nosuch{run="$nosuch"}'
    chart["datasource"] = {"uid": "mine"}
    board["templating"]["list"].pop(0)
    del board["schemaVersion"]
    assert {fault.split(" ")[0] for fault in faults(board)} == {"no", chart["title"].split(" ")[0], "panels"}
    assert any("$nosuch" in fault for fault in faults(board))
    assert queried(board) - METRICS == {"gradsieve_nosuch"}
