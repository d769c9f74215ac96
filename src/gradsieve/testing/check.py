"""`check_scheme` holds a scheme to all laws in a few seconds, with the same gradients every time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, cycle
from typing import Any

import torch
from torch import Tensor

from gradsieve.schemes.base import Scheme
from gradsieve.testing import laws
from gradsieve.testing.gradients import KINDS, Source
from gradsieve.testing.ranks import Round, VirtualRanks

WORLDS = (1, 2, 3, 4, 7, 8)
# Steps until a scheme has to have sent every residual.
DRAIN_STEPS = 400


def check_scheme(scheme: Scheme[Any]) -> None:
    """Runs the scheme on 1 to 8 virtual ranks and raises AssertionError where it breaks a law.

    conservation       what ranks spent adds up to the update, exactly where numbers do not round
    nothing lost       all gradients of a run equal all updates plus all residuals
    identical ranks    every rank has the same update and the same replicated state, bit for bit
    valid indices      they are sorted, unique and in range
    inputs unchanged   neither the vector nor the state that were passed in is changed
    dense at 1         with density 1 the update is the sum of everything
    one threshold      all buckets select by the same threshold after `next_states`
    bad values         NaN and infinity raise nothing; the pipeline rejects them before they are applied
    all is sent        once gradients stop, every residual reaches zero

    A tensor that was handed over with an op is spoilt on some ranks: a scheme that reads it again breaks one
    of these laws.

    The message names the law, the ranks, the elements and the gradients. Schemes with a fixed layout of the
    whole model get one bucket; the others several, which are also rebuilt in mid-run.
    """
    for kind in KINDS:
        with _described(scheme, 3, (127,), kind):
            _check_run(scheme, 3, 127, kind)
    kinds = cycle(KINDS)  # 36 lengths and numbers of ranks: each kind gets three of them
    for world in WORLDS:
        for n, kind in zip((0, 1, world - 1, world + 1, 61, 1009), kinds, strict=False):
            with _described(scheme, world, (n,), kind):
                _check_run(scheme, world, n, kind)
        with _described(scheme, world, (509,), "normal, with NaN and infinity in one step"):
            _check_bad_values(scheme, world, 509)
        if not scheme.whole_model:
            with _described(scheme, world, (61, 0, 127), "integers"):
                _check_buckets(scheme, world, (61, 0, 127))
    with _described(scheme, 3, (40,), "constant for 12 steps, then none"):
        check_drains(VirtualRanks(scheme, [40], 3), Source("constant", (40,)))


@contextlib.contextmanager
def _described(scheme: Scheme[Any], world: int, sizes: tuple[int, ...], kind: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        elements = " + ".join(map(str, sizes))
        raise AssertionError(
            f"{error}\n{scheme} with {world} ranks, {elements} elements, gradients: {kind}"
        ) from error


def totals(
    ranks: VirtualRanks, source: Source, steps: int, look: Callable[[Round], None] = lambda round_: None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns sums over these steps and all ranks, for one bucket, in float64: of gradients, of updates, of
    residuals at the end, and of all magnitudes. `look` is called with every round before it is committed."""
    gradients, updates, moved = (
        torch.zeros(ranks.sizes[0], dtype=torch.float64, device="cpu") for _ in range(3)
    )
    for round_ in ranks.advance(source, steps):
        look(round_)
        updates += round_.outcomes[0].update.to_dense().double()
        for rank, outcome in enumerate(round_.outcomes):
            gradient = source(round_.step, rank, 0).double()
            gradients += gradient
            moved += gradient.abs() + outcome.spent.to_dense().double().abs()
    residuals = torch.stack([buckets[0].double() for buckets in ranks.residuals]).sum(0)
    return gradients, updates, residuals, moved


def check_drains(ranks: VirtualRanks, source: Source) -> None:
    """Checks that after 12 steps with gradients and enough without every residual was sent."""
    most = 0.0

    def then_none(step: int, rank: int, bucket: int) -> Tensor:
        return source(step, rank, bucket) * (step < 12)

    while ranks.step < DRAIN_STEPS:
        for _ in ranks.advance(then_none, 20):
            pass
        left = [float(residual.abs().max()) for residual in chain(*ranks.residuals) if len(residual)]
        most = max([most, *left])
        if not any(left):
            break
    rounds = laws.rounds_freely(ranks.scheme)
    laws.check_drained(list(chain(*ranks.residuals)), most if rounds else None)


def _check_run(scheme: Scheme[Any], world: int, n: int, kind: str) -> None:
    source, steps, ranks = Source(kind, (n,)), 3, VirtualRanks(scheme, [n], world)
    exact = source.exact and not laws.rounds_freely(scheme)
    gradients, updates, residuals, moved = totals(
        ranks, source, steps, lambda round_: laws.check_round(round_, exact)
    )
    laws.check_same_states(ranks.states)
    tolerance = moved * (2 * steps + world) * torch.finfo(torch.float32).eps
    laws.check_nothing_lost(gradients, updates, residuals, tolerance)
    for round_ in VirtualRanks(scheme.whole(), [n], world).advance(source, 1):
        laws.check_is_dense_sum(round_)


def _check_bad_values(scheme: Scheme[Any], world: int, n: int) -> None:
    source = Source("normal", (n,))

    def poisoned(step: int, rank: int, bucket: int) -> Tensor:
        gradient = source(step, rank, bucket)
        if step == 1 and rank == world - 1:
            gradient[0], gradient[n // 2] = torch.nan, torch.inf
        return gradient

    for round_ in VirtualRanks(scheme, [n], world).advance(poisoned, 2):
        laws.check_replicated(round_.outcomes)
        laws.check_nothing_mutated(round_)
        laws.check_indices(round_.outcomes[0].update, n)


def _check_buckets(scheme: Scheme[Any], world: int, sizes: tuple[int, ...]) -> None:
    ranks = VirtualRanks(scheme, sizes, world)
    for layout in (sizes, sizes[::-1]):
        ranks.rebuild(layout)
        for round_ in ranks.advance(replace(Source("integers", sizes), sizes=layout), 3):
            laws.check_round(round_, not laws.rounds_freely(scheme))
        laws.check_same_states(ranks.states)
        for states in ranks.states:
            laws.check_one_threshold(states)
