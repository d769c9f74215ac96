"""Published schemes on real processes: their rules train one unit, and nothing is lost."""

from __future__ import annotations

import pytest

from gradsieve.schemes import SCHEMES
from multiproc.harness import Ranks
from multiproc.training import Plan, Run, Seen, check_laws


def train(rank: int, plan: Plan) -> tuple[Seen, str]:
    run = Run(rank, plan).train()
    return run.report(), type(run.sync.pipeline.scheme).__name__


PUBLISHED = {name: kind for name, kind in SCHEMES.items() if kind.whole_model}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rules_train_the_whole_model_at_once(two: Ranks, name: str) -> None:
    plan = Plan(name, density=0.05, exchange=None, steps=5)
    seen, kinds = zip(*two.run(train, plan), strict=True)
    check_laws(seen)
    assert [each.units for each in seen] == [1, 1]
    assert {*kinds} == {PUBLISHED[name].__name__}
    assert all(int(part.count_nonzero()) for part in seen[0].residuals.values()), (
        "all was sent: proves little"
    )
