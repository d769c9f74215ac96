"""To OpenTelemetry: counters and gauges of whichever meter provider the program has set up.

    metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())]))
    sinks=[OpenTelemetry()]

Where figures go (a collector, a console) and how often is the provider's business; without one they go
nowhere.
"""

from __future__ import annotations

from typing import Any

from gradsieve.observe.records import Header, Line
from gradsieve.observe.sinks import FIGURES, known, missing, moved_bytes

_PREFIX = "gradsieve."
COUNTERS = {
    "gradsieve.exchange.count": ("{exchange}", "Exchanges committed while recording"),
    "gradsieve.exchange.io": ("By", "Moved by this rank: sent or received, whichever is more"),
    "gradsieve.stage.time": ("s", "Spent in each stage; waiting is the training's"),
    "gradsieve.recorded.time": ("s", "Since the recording began"),
}
_TARGET = "gradsieve.selection.target_density"


class OpenTelemetry:
    def __init__(self, provider: Any | None = None) -> None:
        """`provider`: a MeterProvider, if it is not the program's global one."""
        try:
            from opentelemetry import metrics
        except ImportError as error:
            raise missing("opentelemetry-sdk", "otel") from error
        meter = metrics.get_meter("gradsieve", meter_provider=provider)
        self._counters = {
            name: meter.create_counter(name, unit=unit, description=text)
            for name, (unit, text) in COUNTERS.items()
        }
        self._gauges = {
            figure.field: meter.create_gauge(
                _PREFIX + figure.dotted, unit=figure.unit, description=figure.meaning
            )
            for figure in FIGURES
        }
        self._target = meter.create_gauge(_TARGET, unit="1", description="That the scheme was given")

    def begin(self, header: Header) -> None:
        self._header, self._at = header, 0.0
        self._attributes: dict[str, str | int] = {
            "gradsieve.run": header.name,
            "gradsieve.rank": header.rank,
            "gradsieve.scheme": header.scheme,
        }
        self._target.set(header.density, self._attributes)

    def take(self, line: Line) -> None:
        own, counters = self._attributes, self._counters
        for figure, value in known(line):
            self._gauges[figure.field].set(value, own)
        counters["gradsieve.exchange.count"].add(1, own)
        counters["gradsieve.exchange.io"].add(moved_bytes(self._header, line), own)
        counters["gradsieve.recorded.time"].add(line.at - self._at, own)
        self._at = line.at
        for stage, seconds in line.seconds.items():
            counters["gradsieve.stage.time"].add(seconds, {**own, "gradsieve.stage": stage})

    def close(self) -> None:
        """What was not exported yet is the provider's to flush."""
