"""`bench lost`: exactly nothing, or it is seen."""

from __future__ import annotations

import pytest
import torch

from gradsieve.schemes import SCHEMES
from gradsieve_tools.bench import lost
from gradsieve_tools.bench.common.recordings import Recording
from gradsieve_tools.specs import parse

N, WORLD, STEPS = 600, 8, 6


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Magnitudes over nine orders, as gradients have."""
    source = torch.Generator().manual_seed(1)
    sizes = 10.0 ** (-9 * torch.rand(STEPS, WORLD, N, generator=source))
    return Recording([N], torch.randn(STEPS, WORLD, N, generator=source) * sizes, [])


@pytest.mark.parametrize("name", [name for name, kind in SCHEMES.items() if not kind.no_comm])
def test_no_scheme_loses_anything(name: str, recording: Recording) -> None:
    figures = lost.measure(parse(name, 0.05), lost.on_a_grid(recording))
    assert figures["lost"] == 0.0


@pytest.mark.parametrize("text", ["gtopk:paper=true", "spardl:residuals=end", "spardl:residuals=local"])
def test_what_the_published_rules_lose_is_seen(text: str, recording: Recording) -> None:
    figures = lost.measure(parse(text, 0.05), lost.on_a_grid(recording))
    assert figures["lost"] > 0.01
