"""Records of the replicas that are there, and of those that are missing with their residuals."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

_log = logging.getLogger("gradsieve")


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """Describe a replica after the last exchange that was committed with it."""

    name: str
    group: int
    exchange: int
    residual: float  # norm of its residual then, which is in no other replica's model


@dataclass(slots=True)
class Membership:
    """Keep records by identity, the same on all replicas that share a model."""

    present: dict[int, ReplicaRecord] = field(default_factory=dict)
    missing: dict[int, ReplicaRecord] = field(default_factory=dict)
    returned: int = 0

    def last_of(self, identity: int) -> tuple[int, int] | None:
        """Return group and number of the last exchange that was committed with a replica."""
        record = self.present.get(identity) or self.missing.get(identity)
        return None if record is None else (record.group, record.exchange)

    def commit(self, members: Mapping[int, ReplicaRecord]) -> None:
        for identity in self.present.keys() - members.keys():
            gone = self.missing[identity] = self.present[identity]
            _log.warning(
                "exchange %d: replica %s is gone. Its residual, of norm %.4g after its last exchange "
                "(%d), is lost unless it returns; so are its steps since then",
                max(record.exchange for record in members.values()),
                gone.name,
                gone.residual,
                gone.exchange,
            )
        for identity in self.missing.keys() & members.keys():
            self.returned += 1
            _log.info("replica %s is back, with its residual", self.missing.pop(identity).name)
        self.present = dict(members)

    def figures(self) -> dict[str, float]:
        return {
            "replicas": len(self.present),
            "replicas_missing": len(self.missing),
            "replicas_returned": self.returned,
            "lost_mass": sum(gone.residual for gone in self.missing.values()),
        }
