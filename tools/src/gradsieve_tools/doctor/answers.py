"""What ranks sent over the store, checked before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradsieve.comm.links import Links
from gradsieve.errors import Malformed
from gradsieve_tools.doctor.facts import Facts, Interface
from gradsieve_tools.doctor.model import ModelFigures

_LONGEST = 400


@dataclass(frozen=True, slots=True)
class Answer:
    latency: dict[int, float] = field(default_factory=dict)
    incoming: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    message: float = 0.0
    memory: float = 0.0
    selection: float = 0.0
    pace: float = 0.0
    launch: float = 0.0
    connections: dict[str, int] = field(default_factory=dict)
    ring: Links | None = None
    model: ModelFigures | None = None
    error: str = ""

    @classmethod
    def read(cls, rank: int, world: int, said: Any) -> Answer:
        sent = _Sent(rank, said)
        if error := sent.text("error"):
            return cls(error=error)

        def of_ranks(name: str) -> dict[int, Any]:
            found = sent.mapping(name)
            if not all(key.isascii() and key.isdigit() and int(key) < world for key in found):
                raise sent.error(name)
            return {int(key): value for key, value in found.items()}

        return cls(
            latency={other: sent.figure("latency", value) for other, value in of_ranks("latency").items()},
            incoming={other: sent.figure("incoming", value) for other, value in of_ranks("incoming").items()},
            failed={other: sent.short("failed", value) for other, value in of_ranks("failed").items()},
            message=sent.figure("message"),
            memory=sent.figure("memory"),
            selection=sent.figure("selection"),
            pace=sent.figure("pace"),
            launch=sent.figure("launch"),
            connections={
                sent.short("connections", name): sent.count("connections", value)
                for name, value in sent.mapping("connections").items()
            },
            ring=_ring(rank, sent.get("ring")),
            model=_model(rank, sent.get("model")),
        )


def facts_from(rank: int, said: Any) -> Facts:
    sent = _Sent(rank, said)
    names = ("hostname", "alias", "machine", "host", "toward_master", "kernels")
    return Facts(
        rank=rank,
        **{name: sent.text(name) for name in names},
        interfaces=tuple(_interface(rank, each) for each in sent.items("interfaces")),
        resolved=tuple(sent.short("resolved", each) for each in sent.items("resolved")),
        environment=_texts(sent, "environment"),
        threads=sent.count("threads"),
        cores=sent.count("cores"),
        quota=sent.figure("quota"),
        versions=_texts(sent, "versions"),
        lacks=tuple(sent.short("lacks", each) for each in sent.items("lacks")),
    )


def _interface(rank: int, said: Any) -> Interface:
    sent = _Sent(rank, said)
    name, address, network = (sent.text(each) for each in ("name", "address", "network"))
    up, loopback = (sent.get(each) is True for each in ("up", "loopback"))
    return Interface(name, address, network, up, loopback, sent.count("speed"))


def _ring(rank: int, said: Any) -> Links | None:
    if said is None:
        return None
    sent = _Sent(rank, said)
    latency, word = sent.figure("latency"), sent.figure("word")
    if not word:
        raise sent.error("ring")
    return Links(latency, word)


def _model(rank: int, said: Any) -> ModelFigures | None:
    if said is None:
        return None
    sent = _Sent(rank, said)
    times = {name: None if sent.get(name) is None else sent.figure(name) for name in ("forward", "backward")}
    conflicts = [sent.short("conflicts", each) for each in sent.items("conflicts")]
    return ModelFigures(sent.count("parameters"), sent.count("units"), **times, conflicts=conflicts)


def _texts(sent: _Sent, name: str) -> dict[str, str]:
    return {sent.short(name, key): sent.short(name, value) for key, value in sent.mapping(name).items()}


class _Sent:
    def __init__(self, rank: int, said: Any) -> None:
        self._rank = rank
        if not isinstance(said, Mapping):
            raise Malformed(f"rank {rank} sent the doctor something that is no object")
        self._said = said

    def error(self, name: str) -> Malformed:
        return Malformed(f"rank {self._rank} sent the doctor a {name!r} that cannot be: other version?")

    def get(self, name: str) -> Any:
        return self._said.get(name)

    def text(self, name: str) -> str:
        return self.short(name, self._said.get(name))

    def short(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) > _LONGEST:
            raise self.error(name)
        return "".join(c if c.isprintable() else " " for c in value)

    def figure(self, name: str, value: Any = None) -> float:
        value = self._said.get(name) if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self.error(name)
        return float(value)

    def count(self, name: str, value: Any = None) -> int:
        value = self._said.get(name) if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise self.error(name)
        return value

    def items(self, name: str) -> list[Any]:
        value = self._said.get(name)
        if not isinstance(value, list):
            raise self.error(name)
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self._said.get(name)
        if not isinstance(value, Mapping):
            raise self.error(name)
        return value
