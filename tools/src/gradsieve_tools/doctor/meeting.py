"""Ranks send each other facts over the store of their rendezvous, which works where gloo does not.

Rank 0 reads what the others say, and says what is done next. What is read is JSON of a bounded length; what
it means is checked by the code that asked for it.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from gradsieve.errors import Malformed, PeerError

# For ranks that start late: sixty processes that load torch on two cores take a minute
PATIENCE = timedelta(seconds=120)
_LONGEST = 1 << 20


class Board:
    def __init__(self, store: Store, rank: int, world: int, patience: timedelta = PATIENCE) -> None:
        self.store, self.rank, self.world, self.patience = store, rank, world, patience

    @classmethod
    def join(cls) -> Board:
        if "RANK" not in os.environ:
            return cls(HashStore(), 0, 1)
        try:
            store, rank, world = next(rendezvous("env://", timeout=PATIENCE))
        except (RuntimeError, ValueError) as error:
            where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise PeerError(
                f"rank {os.environ['RANK']} cannot reach the others at {where} (MASTER_ADDR:MASTER_PORT): "
                f"is rank 0 running there, and its port open? {error}"
            ) from error
        return cls(PrefixStore("gradsieve/doctor", store), rank, world)

    def tell(self, topic: str, content: Any) -> None:
        self.store.set(f"{topic}/{self.rank}", json.dumps(content))

    def hear(self, topic: str) -> dict[int, Any]:
        """Return what each rank sent, but for those that were late."""
        keys = {rank: f"{topic}/{rank}" for rank in range(self.world)}
        try:
            self.store.wait(list(keys.values()), self.patience)
        except RuntimeError:
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: self._read(key) for rank, key in keys.items()}

    def decide(self, topic: str, content: Any = None) -> Any:
        """Return what rank 0 says, on all ranks."""
        if self.rank == 0:
            self.tell(topic, content)
            return content
        try:
            self.store.wait([f"{topic}/0"], 2 * self.patience)
        except RuntimeError as error:
            raise PeerError(f"rank {self.rank}: rank 0 has not said how to go on: {error}", (0,)) from error
        return self._read(f"{topic}/0")

    def gather(self, what: str) -> bool:
        """Wait until all are here; False where some are not in time."""
        if self.store.add(f"{what}/count", 1) == self.world:
            self.store.set(f"{what}/all", "here")
        try:
            self.store.wait([f"{what}/all"], self.patience)
        except RuntimeError:
            return False
        return True

    def _read(self, key: str) -> Any:
        content = self.store.get(key)
        try:
            if len(content) > _LONGEST:
                raise ValueError(f"{len(content)} bytes")
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"rank {self.rank}: {key} in the store cannot be read: {error}") from error
