"""Settings with which a run is the same bits each time, from its first step on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gradsieve


def repeatable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings`, with a budget where otherwise gradsieve would time the first exchanges to choose one."""
    is_said = settings.keys() & {"scheme", "density", "bits"}
    of_gradients = isinstance(settings.get("exchange"), gradsieve.Gradients)
    return {**settings} if is_said or of_gradients else {"bits": 0.75, **settings}
