"""`ElasticSync`: torchft decides who is there and whether an exchange counts; a `Member` exchanges."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torchft.manager import Manager
from torchft.process_group import ProcessGroup, create_store_client

from gradsieve.checkpoint import files
from gradsieve.errors import ConfigError, GradsieveError, PeerError
from gradsieve.frameworks.torchft.member import Member

_log = logging.getLogger("gradsieve")

_PATIENCE = 5.0  # seconds without a quorum until a warning


class Place(NamedTuple):
    store: str
    rank: int
    world: int
    quorum: int


class Rendezvous(ProcessGroup):  # type: ignore[misc]  # torchft comes without types
    """Keep the place of every quorum that torchft's manager sets up, instead of a process group."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.place: Place | None = None

    def configure(self, store: str, replica: str, rank: int, world: int, quorum: int, *_: object) -> None:
        self.place = Place(store, rank, world, quorum)


class ElasticSync:
    """`GradientSync` for replicas that come and go."""

    def __init__(
        self,
        manager: Manager,
        rendezvous: Rendezvous,
        parameters: Iterable[tuple[str, Tensor]],
        optimizer: Any,
        *,
        name: str = "",
        timeout: timedelta = timedelta(seconds=30),
        **settings: Any,
    ) -> None:
        """Join torchft's replicas in the first `reduce()`. An exchange waits up to `timeout` for a replica
        that lives and does not come. `settings` are those of GradientSync without `group`."""
        if dist.is_initialized():
            raise ConfigError("torch.distributed is initialised already: inside torchft the sync does that")
        if getattr(manager, "_use_async_quorum", False):
            raise ConfigError(
                "give torchft's Manager use_async_quorum=False: the group is rebuilt inside the quorum"
            )
        if "group" in settings:
            raise ConfigError("inside torchft the group is the quorum: leave out group=")
        # Manager has no public names for these; under other names only messages would be poorer.
        self._retries = getattr(manager, "_quorum_retries", None)
        self._patience = getattr(manager, "_quorum_timeout", timedelta(seconds=60)).total_seconds()
        if self._retries == 0:
            _log.warning(
                "a lighthouse that is gone for a moment ends all replicas: give torchft's Manager "
                "quorum_retries=300 and quorum_timeout=timedelta(minutes=5), or as long as it may take to "
                "start it again"
            )
        self._manager, self._rendezvous, self._timeout = manager, rendezvous, timeout
        self._replica = Member(parameters, optimizer, name or f"replica {id(self):x}", settings)
        self._place: Place | None = None
        self._is_met = False  # has joined the members of a quorum, and owes them an exchange
        self._is_brought_up = False  # in this quorum
        self._is_replaced = False  # its model, by that, since the last step
        manager.register_state_dict_fn("gradsieve", self._bring_up, self._replica.state)

    def reduce(self) -> bool:
        """Exchange with the replicas that are there, between backward and the optimizer's step, until an
        exchange counts. Return False if the step is to be skipped: this replica was brought up from a peer,
        and its gradient is of the model it had before."""
        self._is_replaced = False
        if self._is_met or self._replica.sync is None or self._replica.pipeline.begins_exchange():
            while not self._attempt("training"):
                pass
        return not self._is_replaced

    def flush(self) -> None:
        """Send the whole residual, at the end of a training, on all replicas. A replica that joins only now
        has nothing to add; the others do not wait for it."""
        while not self._attempt("flush()") or self._is_met:
            pass

    def save(self, folder: str | PathLike[str]) -> bool:
        """Replace the checkpoint in a folder that all replicas see by each replica's model, optimizers and
        residual. Call it on all replicas at the same `manager.current_step()`, after the optimizer's step.
        Return False if nothing was saved: a replica died meanwhile, or this one was brought up and first owes
        the others an exchange. The checkpoint before is then as it was."""
        sync = self._replica.sync
        if sync is None:
            raise ConfigError(f"replica {self._replica.name}: there is nothing to save before reduce()")
        if self._is_met:
            return False
        try:
            sync.save(folder)
        except PeerError as error:
            _log.warning(
                "replica %s: no checkpoint of exchange %d was saved, the one before is as it was: %s",
                self._replica.name,
                self._manager.current_step(),
                error,
            )
            return False
        return True

    def load(self, folder: str | PathLike[str]) -> None:
        """Load what `save` wrote, also by another number of replicas, if all of them begin. It is read after
        their rendezvous, in the first `reduce()`, which then returns False. A replica that is started again
        while others train is brought up by them instead. Call it before the first `reduce()`."""
        if self._replica.sync is not None:
            raise ConfigError(
                f"replica {self._replica.name}: load() comes before the first reduce(). To go back to a "
                "checkpoint, start all replicas again"
            )
        files.read_manifest(Path(folder))
        self._replica.checkpoint = Path(folder)

    def _attempt(self, call: str) -> bool:
        """Make one quorum, one exchange and one vote, and return whether the exchange counts. A replica that
        is brought up in between first goes back to its training, because the others may be at its end, and
        exchanges in its next call. The manager's max_retries limits failures in a row."""
        manager, replica = self._manager, self._replica
        try:
            if not self._is_met:
                self._is_brought_up = False
                self._ask_for_quorum(shrink_only=call != "training")
                self._is_met = manager.errored() is None and self._enter()
                if self._is_met and replica.load_if_all_begin():
                    step, world = replica.pipeline.step, replica.pipeline.world
                    manager.load_state_dict({"step": step, "batches_committed": step * world})
                    self._is_brought_up = self._is_replaced = True
                if self._is_met and self._is_brought_up:
                    return True
            if self._is_met:
                replica.exchange(call)
        except PeerError as error:
            _log.warning(
                "replica %s: exchange %d failed and is made again with the replicas that are there: %s",
                replica.name,
                manager.current_step(),
                error,
            )
            manager.report_error(error)
        self._is_met = False
        if manager.should_commit():
            replica.commit()
            return True
        replica.failed += 1  # what was prepared is kept until the others say whether they committed it
        return False

    def _ask_for_quorum(self, shrink_only: bool) -> None:
        manager, name = self._manager, self._replica.name
        warning = threading.Timer(
            _PATIENCE,
            _log.warning,
            (
                "replica %s, exchange %d: no quorum for %.0f s. It waits up to %.0f s (the manager's "
                "quorum_timeout) for the lighthouse, or for as many replicas as have to be there",
                *(name, manager.current_step(), _PATIENCE, self._patience),
            ),
        )
        warning.daemon = True
        warning.start()
        try:
            manager.start_quorum(shrink_only=shrink_only)
        except TimeoutError as error:
            raise GradsieveError(
                f"replica {name}, exchange {manager.current_step()}: no quorum within "
                f"{self._patience:.0f} s. The "
                "lighthouse is gone, fewer replicas are there than have to be, or the others have ended. "
                "Start the lighthouse and then this replica again. To wait longer, give torchft's Manager a "
                "longer quorum_timeout; to find a lighthouse that was started again, quorum_retries, for how "
                f"often it is asked in that time (now {self._retries})"
            ) from error
        finally:
            warning.cancel()

    def _enter(self) -> bool:
        """Join the group of this quorum, if it is a new one."""
        place, replica = self._rendezvous.place, self._replica
        if place is self._place or place is None:
            if replica.sync is None:
                raise GradsieveError(
                    f"replica {replica.name}, exchange {self._manager.current_step()}: torchft gave the same "
                    "quorum again after a failure, and no group can be made twice: restart this replica"
                )
            return True
        self._place = place
        replica.leave_group()
        if dist.is_initialized():
            dist.destroy_process_group()
        try:
            dist.init_process_group(
                "gloo",
                store=create_store_client(f"{place.store}/{self._manager.current_step()}", self._timeout),
                rank=place.rank,
                world_size=place.world,
                timeout=self._timeout,
            )
        except RuntimeError as error:
            raise PeerError(
                f"replica {replica.name}: the {place.world} members of quorum {place.quorum} found no "
                f"rendezvous: {error}"
            ) from None
        replica.join(place.quorum)
        return True

    def _bring_up(self, state: dict[str, Any]) -> None:
        self._is_brought_up = True
        self._is_replaced |= self._replica.take(state)

    @property
    def present(self) -> list[str]:
        """Return the names of the replicas that made the last exchange together."""
        return [record.name for record in self._replica.membership.present.values()]

    @property
    def losses(self) -> list[dict[str, Any]]:
        """Return the missing replicas, each with the norm of its residual after its last exchange."""
        gone = self._replica.membership.missing.values()
        return [{"name": g.name, "exchange": g.exchange, "waiting": g.residual} for g in gone]

    def metrics(self) -> dict[str, Any]:
        """Return GradientSync's metrics with replicas, replicas_missing, replicas_returned, lost_mass (the
        sum of the norms in `losses`) and exchanges_failed."""
        sync = self._replica.sync
        ours = {**self._replica.membership.figures(), "exchanges_failed": self._replica.failed}
        return ours if sync is None else {**sync.metrics(), **ours}

    def close(self) -> None:
        """Leave the shared model in the parameters, without residuals that were not flushed."""
        if self._replica.sync is not None:
            self._replica.sync.close()
            self._replica.sync = None
        if dist.is_initialized():
            dist.destroy_process_group()
