"""Another number of ranks goes on with what waited, for every scheme: 4 to 2, 3, 6 and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsieve import Gradients, MismatchError, Steps
from gradsieve.checkpoint import rank_state
from gradsieve.errors import Malformed
from gradsieve.schemes import SCHEMES
from gradsieve.testing.laws import same_bits
from laws.crew import Crew, adamw, fake_group, sgd  # noqa: F401  # a fixture

WAY = [4, 2, 3, 6, 4]
GRADIENTS = Gradients(small=6)


def go_the_way(way: list[int], optimizer: Any = sgd, **settings: Any) -> list[dict[str, Any]]:
    """Two steps with each number of ranks; what was there before and after each change."""
    seen, states, before = [], None, None
    for place, world in enumerate(way):
        with Crew(world, optimizer, **settings) as crew:
            if states is not None:
                crew.load(states)
                seen.append({"before": before, "after": _look(crew)})
            crew.train(2 * place, 2 * place + 2)
            crew.everyone(lambda hand: hand.sync.verify())
            states, before = crew.states(), _look(crew)
    return seen


def _look(crew: Crew) -> dict[str, Any]:
    kinds = {key.partition("/")[0] for key in crew.hands[0].sync.pipeline.kept()}
    return {
        "waits": crew.waits() if kinds else torch.zeros(1),
        "shared": [hand.memory("shared") for hand in crew.hands] if "shared" in kinds else [],
        "step": crew.hands[0].sync.pipeline.step,
    }


def check(seen: list[dict[str, Any]]) -> None:
    for change in seen:
        before, after = change["before"], change["after"]
        torch.testing.assert_close(after["waits"], before["waits"], rtol=1e-5, atol=1e-6)
        assert after["step"] == before["step"]
        assert all(same_bits([each], before["shared"][:1]) for each in after["shared"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_waits_is_kept_for_another_number_of_ranks(scheme: str) -> None:
    seen = go_the_way(WAY, scheme=scheme, density=0.1, exchange=Steps(small=6))
    check(seen)
    if not SCHEMES[scheme].lossless:
        assert all(float(change["before"]["waits"].abs().max()) > 1e-3 for change in seen), "nothing waited"


@pytest.mark.parametrize(
    "treatment",
    [
        GRADIENTS,
        Steps(small=6, every=2),
    ],
    ids=lambda settings: settings.describe(),
)
def test_whatever_the_exchange_settings(treatment: Steps | Gradients) -> None:
    check(go_the_way([4, 3, 4], scheme="exdyna", density=0.1, exchange=treatment))


def test_a_loss_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: old ranks that nobody takes over, or a sum that is not divided by their number."""
    monkeypatch.setattr(
        rank_state, "ranks_to_sum", lambda rank, world, old: range(rank, min(old, world), world)
    )
    with pytest.raises(AssertionError):
        check(go_the_way([4, 2], scheme="exdyna", density=0.1))


def test_the_model_that_all_of_it_leads_to_stays_where_it_was() -> None:
    """Flushed at once, the old ranks and the new ones end at one model."""
    with Crew(4, adamw, bits=0.8) as crew, Crew(3, adamw, bits=0.8) as fewer:
        fewer.load(crew.train(0, 5).states())
        for each in (crew, fewer):
            each.everyone(lambda hand: hand.sync.flush())
        torch.testing.assert_close(
            fewer.hands[0].memory("shared"), crew.hands[0].memory("shared"), rtol=1e-5, atol=1e-6
        )


def test_ranks_without_all_they_need_are_refused_on_all() -> None:
    with Crew(4, bits=0.8) as crew, Crew(2, bits=0.8) as fewer:
        states = crew.train(0, 2).states()
        own = {key: part for key, part in states.items() if not key.startswith("rank3/")}
        before = fewer.states()
        first, second = fewer.errors(lambda hand: hand.sync.load_state_dict(own))
        assert isinstance(first, MismatchError)
        assert "rank 1 refused: 4 ranks saved this checkpoint and 2 load it" in str(first)
        assert isinstance(second, Malformed)
        assert "is not given that of rank 3" in str(second)
        assert same_bits(list(fewer.states().values()), list(before.values()))
