"""To Prometheus: counters and gauges with labels `run` and `rank`, on a port of each rank's own.

    sinks=[Prometheus(port=9400)]        # rank 0 of a host at http://127.0.0.1:9400/metrics, rank 1 at 9401

Only this host sees it unless `address` says otherwise: there is no password. With `port=None` nothing is
served: the figures are in `registry`, for whoever serves that already.
"""

from __future__ import annotations

import os
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve.observe.records import Header, Line
from gradsieve.observe.sinks import FIGURES, known, missing, moved_bytes

_PREFIX = "gradsieve_"
_LABELS = ("run", "rank")
COUNTERS = {
    "exchanges_total": ("Exchanges committed while recording", _LABELS),
    "exchange_bytes_total": ("Moved by this rank: sent or received, whichever is more", _LABELS),
    "stage_seconds_total": ("Spent in each stage; waiting is the training's", (*_LABELS, "stage")),
    "recorded_seconds_total": ("Since the recording began", _LABELS),
}
GAUGES = {
    **{figure.metric: figure.meaning for figure in FIGURES},
    "target_density_ratio": "That the scheme was given",
    "parameters": "Of the model",
    "world_size": "Ranks in the training",
}
METRICS = {_PREFIX + name for name in (*COUNTERS, *GAUGES, "run_info")}
"""All that is exported."""


class Prometheus:
    def __init__(
        self, port: int | None = 9400, address: str = "127.0.0.1", registry: Any | None = None
    ) -> None:
        try:
            import prometheus_client as client
        except ImportError as error:
            raise missing("prometheus_client", "prometheus") from error
        self.port, self.address = port, address
        self.registry = client.CollectorRegistry() if registry is None else registry
        self._client = client
        self._server: Any | None = None
        try:
            self._metrics: dict[str, Any] = {
                name: client.Counter(_PREFIX + name, text, labels, registry=self.registry)
                for name, (text, labels) in COUNTERS.items()
            }
            for name, text in GAUGES.items():
                self._metrics[name] = client.Gauge(_PREFIX + name, text, _LABELS, registry=self.registry)
            info = (*_LABELS, "scheme", "exchange")
            self._metrics["run_info"] = client.Gauge(_PREFIX + "run_info", "1", info, registry=self.registry)
        except ValueError as error:
            raise ConfigError(f"this registry has a gradsieve sink already: {error}") from error

    def begin(self, header: Header) -> None:
        self._header, self._at, self._labels = header, 0.0, (header.name, str(header.rank))
        self._of("target_density_ratio").set(header.density)
        self._of("parameters").set(header.parameters)
        self._of("world_size").set(header.world)
        self._of("run_info", header.scheme, header.exchange).set(1)
        if self.port is not None and self._server is None:
            # Ranks of one host share its ports; torchrun numbers them.
            port = self.port + int(os.environ.get("LOCAL_RANK", header.rank)) if self.port else 0
            try:
                server, self._thread = self._client.start_http_server(port, self.address, self.registry)
            except (OSError, OverflowError) as error:
                raise ConfigError(f"port {port} of {self.address} cannot be served: {error}") from error
            self._server, self.port = server, server.server_port

    def take(self, line: Line) -> None:
        for figure, value in known(line):
            self._of(figure.metric).set(value)
        self._of("exchanges_total").inc()
        self._of("exchange_bytes_total").inc(moved_bytes(self._header, line))
        self._of("recorded_seconds_total").inc(line.at - self._at)
        self._at = line.at
        for stage, seconds in line.seconds.items():
            self._of("stage_seconds_total", stage).inc(seconds)

    def _of(self, name: str, *more: str) -> Any:
        return self._metrics[name].labels(*self._labels, *more)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None
