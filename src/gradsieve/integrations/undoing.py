"""What a constructor that fails gives back: the user has no sync that could be closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsieve.integrations.gradient_sync import GradientSync


def undo(sync: GradientSync) -> None:
    """Model and optimizer as they were, however far the constructor had come; the thread and group ended."""
    try:
        sync.leave()
    finally:
        if "fitted" in vars(sync):
            sync.fitted.give_back()
        sync.engine.close()
