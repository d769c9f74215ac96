"""Faults of order, to be planted into gradsieve while it trains on the fake device.

That runs all work at once, so that a training with a fault ends as ever: only the detector sees that on a GPU
it might not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from accelerator.recorder import unnoted
from gradsieve.runner import Runner


class _Deaf(torch.Stream):
    """Waits for no event."""

    def wait_event(self, event: torch.Event) -> None:
        pass


class _Hasty(torch.Stream):
    """The host does not wait for it."""

    def synchronize(self) -> None:
        pass


def _no_event() -> AbstractContextManager[Any]:
    return mock.patch.object(torch, "Stream", _Deaf)


@contextmanager
def _no_synchronise() -> Iterator[None]:
    current = torch.accelerator.current_stream

    def hasty(device: torch.device) -> torch.Stream:
        now = current(device)
        return _Hasty(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)

    with (
        mock.patch.object(torch, "Stream", _Hasty),
        mock.patch.object(torch.accelerator, "current_stream", hasty),
    ):
        yield


def _no_wait() -> AbstractContextManager[Any]:
    """For gloo."""
    return mock.patch.object(dist.Work, "wait", _without_note(dist.Work.wait, "carried"))


@contextmanager
def _switch_too_early() -> Iterator[None]:
    """Parameters are pointed to the other model while that is still being written."""
    with (
        mock.patch.object(Runner, "complete", _without_note(Runner.complete, "acquire")),
        mock.patch.object(Runner, "refresh", _without_note(Runner.refresh, "acquire")),
    ):
        yield


def _buffer_used_twice() -> AbstractContextManager[Any]:
    """One pinned buffer for both halves of what is copied to the device, and no wait between them."""
    to = torch.Tensor.to

    def halved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not (kwargs.get("non_blocking") and self.is_cpu and self.is_pinned() and self.numel() > 1):
            return to(self, *args, **kwargs)
        halves = self.flatten().tensor_split(2)
        buffer = torch.empty(len(halves[0]), dtype=self.dtype, pin_memory=True)
        target = torch.empty(self.numel(), dtype=self.dtype, device=args[0])
        for place, half in zip(target.tensor_split(2), halves, strict=True):
            place.copy_(buffer[: len(half)].copy_(half), non_blocking=True)
        return target.view(self.shape)

    return mock.patch.object(torch.Tensor, "to", halved)


def _stream_forgotten() -> AbstractContextManager[Any]:
    """Whatever stream a thread works on, the default one is taken for it."""
    current = torch.accelerator.current_stream

    def default(device: torch.device) -> torch.Stream:
        now = current(device)
        return torch.Stream(stream_id=0, device_index=now.device_index, device_type=now.device_type)

    return mock.patch.object(torch.accelerator, "current_stream", default)


def _without_note(call: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def quiet(*args: Any, **kwargs: Any) -> Any:
        with unnoted(kind):
            return call(*args, **kwargs)

    return quiet


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no event": _no_event,
    "no synchronise": _no_synchronise,
    "no wait": _no_wait,
    "a .data switch too early": _switch_too_early,
    "a staging buffer used twice": _buffer_used_twice,
    "a stream forgotten": _stream_forgotten,
}
