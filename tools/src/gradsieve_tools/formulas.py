"""What a step of each scheme costs: words and rounds by the published formulas, and the ops of a usual step.

`bench traffic` holds every scheme to its formulas; `plan` predicts seconds from ops, comparisons and merges.
Counts and imbalances are those of the state after a step; without a state, k elements and a balanced step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Op
from gradsieve.errors import ConfigError
from gradsieve.schemes.base import Scheme, log2_ceil
from gradsieve.schemes.baselines.dense import Dense
from gradsieve.schemes.baselines.noop import Noop
from gradsieve.schemes.baselines.randomk import RandomK
from gradsieve.schemes.baselines.topk import TopK
from gradsieve.schemes.baselines.topk_union import TopKUnion
from gradsieve.schemes.deft import Deft
from gradsieve.schemes.exclusive import HEADER, Exclusive
from gradsieve.schemes.oktopk_parts import Regional
from gradsieve.schemes.papers.deft import DeftPaper
from gradsieve.schemes.papers.exclusive import PublishedThreshold
from gradsieve.schemes.shares import evenly
from gradsieve.schemes.spardl import SparDL
from gradsieve.schemes.stripes import Stripes
from gradsieve.wire import indices
from gradsieve.wire.values import VALUE_CODECS
from gradsieve_tools.baselines.cltk import CltK
from gradsieve_tools.baselines.gathering import Gathering
from gradsieve_tools.baselines.gaussiank import GaussianK
from gradsieve_tools.baselines.gtopk import GTopK
from gradsieve_tools.baselines.hard_threshold import HardThreshold
from gradsieve_tools.baselines.sidco import Sidco
from gradsieve_tools.link_costs import blank, rows_asked, stripes_asks, stripes_row

SchemeAny: TypeAlias = Any  # a scheme of the class that the row of the table is for
Words: TypeAlias = Callable[[SchemeAny, int, int, Any], float]

# Comparisons of every element that an exact top-k costs as much as (processor time in
# `step-mlp-1gbit-2026-11-15.json` and `step-exclusive-2026-11-16.json`).
TOP_K = 5.0
# Times the mean that the longest row is where whole layers are dealt out: 1.3 to 3.5 were seen with 2 to 64
# ranks (`traffic-published-16-2026-11-16.json` and `-2-4-64-`).
_UNEVEN = 1.6


@dataclass(frozen=True, kw_only=True)
class Formula:
    """The costs of a scheme follow from its settings, the elements n, the ranks, and perhaps a state."""

    # Four-byte words that the busiest rank moves in a step.
    words: Words
    # Messages one after the other.
    rounds: Callable[[SchemeAny, int, int, Any], int]
    # The ops of a converged and balanced step. None: the words in the rounds, as messages between two ranks.
    asks: Callable[[SchemeAny, int, int], Sequence[Op]] | None = None
    # Comparisons that selecting costs as much as, an element.
    compares: Callable[[SchemeAny, int], float] = lambda scheme, world: TOP_K
    # How often what was selected is sorted, packed and added up on its way; 0 where it needs no index.
    merges: float = 1.0
    # Least and most words over the formula's, where it is not met to a tenth.
    band: Callable[[SchemeAny, int, int, Any], tuple[float, float]] | None = None


def formula_of(scheme: Scheme[Any]) -> Formula:
    """Finds the row of the scheme's class, or of the nearest class that it inherits from."""
    for kind in type(scheme).__mro__:
        if kind in FORMULAS:
            return FORMULAS[kind]
    raise ConfigError(f"gradsieve_tools.formulas.FORMULAS does not say what {type(scheme).__name__} costs")


def words(scheme: Scheme[Any], n: int, world: int, state: Any = None) -> float:
    return formula_of(scheme).words(scheme, n, world, state)


def rounds(scheme: Scheme[Any], n: int, world: int, state: Any = None) -> int:
    return formula_of(scheme).rounds(scheme, n, world, state)


def words_band(scheme: Scheme[Any], n: int, world: int, state: Any = None) -> tuple[float, float]:
    """Returns the least and the most words that agree with the formula."""
    band = formula_of(scheme).band
    if band is not None:
        return band(scheme, n, world, state)
    expected = words(scheme, n, world, state)
    return 0.9 * expected, 1.1 * expected


def asks(scheme: Scheme[Any], n: int, world: int) -> list[Op]:
    """Returns the ops of a usual step, in tensors without content."""
    formula = formula_of(scheme)
    if formula.asks is not None:
        return list(formula.asks(scheme, n, world))
    times = rounds(scheme, n, world)
    message = blank(round(words(scheme, n, world) / max(1, times)))
    return [Exchange(message, 1, 1, message.numel())] * times


def compared(scheme: Scheme[Any], n: int, world: int) -> float:
    """Returns the comparisons that a rank's selection costs as much as."""
    return n * formula_of(scheme).compares(scheme, world)


def coded(scheme: Scheme[Any], n: int) -> int:
    """Returns how many elements a rank rounds to few bits in a step."""
    return 0 if getattr(scheme, "values", "exact") == "exact" else scheme.k(n)


def _sum_asked(scheme: SchemeAny, count: int, world: int) -> list[Op]:
    """Returns the ops of a sum at places that all ranks know."""
    if scheme.values == "exact":
        return [AllReduce(blank(count, torch.float32))]
    return rows_asked(VALUE_CODECS[scheme.values].predict_size(-(-count // world), torch.float32), world)


# -- schemes whose formula is more than a line ------------------------------------------------------------


def _stripes_words(scheme: Stripes, n: int, world: int, state: Any) -> float:
    if scheme.values == "exact":
        return 2.0 * scheme.k(n) * (world - 1) / world
    return stripes_row(scheme, n, world, state) / 2 * (world - 1)


def _stripes_rounds(scheme: Stripes, n: int, world: int, state: Any) -> int:
    """The all-to-all's messages, P - 1, go at the same time where the network lets them."""
    return 2 * log2_ceil(world) if scheme.values == "exact" else world - 1 + log2_ceil(world)


def _union_words(scheme: SchemeAny, n: int, world: int, state: Any) -> float:
    union = state.union if state else min(n, scheme.k(n) * world)
    return float(scheme.k(n) * (world - 1) + 2.0 * union * (world - 1) / world)


def _union_asks(scheme: SchemeAny, n: int, world: int) -> list[Op]:
    return [AllGather(blank(scheme.k(n))), *_sum_asked(scheme, min(n, scheme.k(n) * world), world)]


def _exclusive_words(scheme: SchemeAny, n: int, world: int, state: Any) -> float:
    """K' (f + 2) (P-1)/P as published, f K' being all rows at the length of the longest."""
    rows = sent = scheme.k(n)
    if state is not None:
        rows, sent = state.longest * scheme.owners(world, state), state.sent
    return float((rows + 2.0 * sent) * (world - 1) / world)


def _exclusive_band(scheme: SchemeAny, n: int, world: int, state: Any) -> tuple[float, float]:
    expected = _exclusive_words(scheme, n, world, state)
    return expected / 6.0, 1.1 * expected


def _exclusive_asks(scheme: SchemeAny, n: int, world: int) -> list[Op]:
    """Rows are an eighth longer than they are filled."""
    span = max(1, n // world)
    capacity = min(span, math.ceil(1.125 * scheme.k(n) / world))
    row = HEADER + indices.choose(capacity, span).predict_size(capacity, span)
    return [AllGather(blank(row, torch.uint8)), *_sum_asked(scheme, scheme.k(n), world)]


def _published_words(scheme: SchemeAny, n: int, world: int, state: Any) -> float:
    imbalance, sent = (scheme.report(state)["imbalance"], state.sent) if state else (1.0, scheme.k(n))
    return float(sent * (imbalance + 2.0) * (world - 1) / world)


def _published_asks(scheme: SchemeAny, n: int, world: int) -> list[Op]:
    row = blank(-(-scheme.k(n) // world))
    return [AllGather(blank(2)), AllGather(row), AllReduce(blank(scheme.k(n), torch.float32))]


def _deft_state(scheme: SchemeAny, n: int, world: int, state: Any) -> Any:
    return state or replace(scheme.begin(n, world), sent=scheme.k(n), longest=scheme.k(n) // world)


def _deft_words(scheme: Deft, n: int, world: int, state: Any) -> float:
    """K' (f + 2) (P-1)/P as published; the norms cost 2 L (P-1)/P instead of the leader's (P + L) log P."""
    state = _deft_state(scheme, n, world, state)
    norms = 2.0 * (state.edges.numel() - 1)
    return float((state.longest * world + 2.0 * state.sent + norms) * (world - 1) / world)


def _deft_asks(scheme: Deft, n: int, world: int) -> list[Op]:
    norms = AllReduce(blank(scheme.begin(n, world).edges.numel() - 1, torch.float32))
    rows = AllGather(blank(math.ceil(_UNEVEN * scheme.k(n) / world)))
    return [norms, rows, *_sum_asked(scheme, scheme.k(n), world)]


def _deft_paper_words(scheme: DeftPaper, n: int, world: int, state: Any) -> float:
    """K' (f + 2) (P-1)/P + (P + L) log P, f K' being all rows at the length of the longest."""
    state = _deft_state(scheme, n, world, state)
    plan = (world + state.edges.numel() - 1) * log2_ceil(world)
    return float((state.longest * world + 2.0 * state.sent) * (world - 1) / world + plan)


def _deft_paper_asks(scheme: DeftPaper, n: int, world: int) -> list[Op]:
    layers, k = scheme.begin(n, world).edges.numel() - 1, scheme.k(n)
    plan = [Broadcast(blank(world), root=0), Broadcast(blank(layers), root=0)]
    row = blank(math.ceil(_UNEVEN * k / world))
    return [*plan, AllGather(blank(2)), AllGather(row), AllReduce(blank(k, torch.float32))]


def _regional_words(scheme: Regional, n: int, world: int, state: Any) -> float:
    """4k of the published 2k to 6k: k elements to owners, k sums (all on exact steps) to all ranks."""
    imbalance, gathered = (state.imbalance, state.gathered) if state else (1.0, scheme.k(n))
    return float(2.0 * (scheme.k(n) * imbalance + gathered) * (world - 1) / world)


def _regional_band(scheme: Regional, n: int, world: int, state: Any) -> tuple[float, float]:
    """2k to 6k as published. The upper end is 2k to the owners and 2k twice, to balance and to gather; of
    more than k sums on an exact step."""
    unit, k = (world - 1) / world, scheme.k(n)
    gathered = max(k, state.gathered if state else 0)
    return 2.0 * k * unit, (2.0 * k + 4.0 * gathered) * unit


def _regional_asks(scheme: Regional, n: int, world: int) -> list[Op]:
    """Counts, elements to their owners, counts, sums to all ranks; without balancing and new regions."""
    k, log = scheme.k(n), log2_ceil(world)
    counts = blank(2 * max(1, world // 2))
    dealt = tuple(evenly(k, world))
    pairs = AllToAll(blank(2 * k).view(k, 2), dealt, dealt)
    rows = AllGather(blank(2 * -(-k // world)))
    return [*[Exchange(counts, 1, 1, counts.numel())] * log, pairs, AllGather(blank(2)), rows]


def _spardl_band(scheme: SparDL, n: int, world: int, state: Any) -> tuple[float, float]:
    k, d = scheme.k(n), (state or scheme.begin(n, world)).teams or 1
    if scheme.across == "r-sag" or d == 1:
        expected = scheme.expected_words(n, world, state)
        return 0.9 * expected, 1.1 * expected
    return 1.8 * k * (2 * world - d - 1) / world, 2.2 * k * (d * d + 2 * world - 3 * d) / world


def _times_log(factor: int) -> Callable[[SchemeAny, int, int, Any], int]:
    """Rounds of so many collectives that double what is known in each."""
    return lambda scheme, n, world, state: factor * log2_ceil(world)


def _no_look(scheme: SchemeAny, world: int) -> float:
    return 0.0


def _own_part(scheme: SchemeAny, world: int) -> float:
    return 1 / world


def _norms_and_own_part(scheme: SchemeAny, world: int) -> float:
    return 1 + TOP_K / world


def _hard_words(scheme: HardThreshold, n: int, world: int, state: Any) -> float:
    k = scheme.k(n)
    longest, union = (state.longest, state.union) if state else (k, min(n, k * world))
    return float((longest + 2.0 * union / world) * (world - 1))


_GATHERING = Formula(
    words=lambda scheme, n, world, state: 2.0 * (state.longest if state else scheme.k(n)) * (world - 1),
    rounds=_times_log(2),
    asks=lambda scheme, n, world: [AllGather(blank(1)), AllGather(blank(2 * scheme.k(n)))],
)

FORMULAS: dict[type, Formula] = {
    Noop: Formula(
        words=lambda scheme, n, world, state: 0.0,
        rounds=lambda scheme, n, world, state: 0,
        asks=lambda scheme, n, world: [],
        compares=_no_look,
        merges=0.0,
    ),
    Dense: Formula(
        words=lambda scheme, n, world, state: 2.0 * n * (world - 1) / world,
        rounds=_times_log(2),
        asks=lambda scheme, n, world: [AllReduce(blank(n, torch.float32))],
        compares=_no_look,
        merges=0.0,
    ),
    Stripes: Formula(
        words=_stripes_words, rounds=_stripes_rounds, asks=stripes_asks, compares=_no_look, merges=0.0
    ),
    RandomK: Formula(
        words=lambda scheme, n, world, state: 2.0 * scheme.k(n) * (world - 1) / world,
        rounds=_times_log(2),
        asks=lambda scheme, n, world: _sum_asked(scheme, scheme.k(n), world),
        compares=_no_look,
    ),
    TopK: Formula(
        words=lambda scheme, n, world, state: 2.0 * scheme.k(n) * (world - 1),
        rounds=_times_log(1),
        asks=lambda scheme, n, world: [AllGather(blank(2 * scheme.k(n)))],
        merges=1.35,
    ),
    # As published, with a gather of counts; ours are 3 log P.
    TopKUnion: Formula(words=_union_words, rounds=_times_log(4), asks=_union_asks),
    Gathering: _GATHERING,
    # Passes to fit a distribution and to correct it, by `schemes-2026-11-15.json` next to top-k.
    GaussianK: replace(_GATHERING, compares=lambda scheme, world: 16.0),
    Sidco: replace(_GATHERING, compares=lambda scheme, world: 20.0),
    HardThreshold: Formula(
        words=_hard_words,
        rounds=_times_log(4),
        asks=lambda scheme, n, world: [AllGather(blank(1)), *_union_asks(scheme, n, world)],
        compares=lambda scheme, world: 1.0,
    ),
    GTopK: Formula(
        words=lambda scheme, n, world, state: 4.0 * scheme.k(n) * log2_ceil(world), rounds=_times_log(2)
    ),
    CltK: Formula(
        words=lambda scheme, n, world, state: scheme.k(n) * (log2_ceil(world) + 2.0 * (world - 1) / world),
        rounds=_times_log(3),
        asks=lambda scheme, n, world: [
            Broadcast(blank(scheme.k(n)), root=0),
            *_sum_asked(scheme, scheme.k(n), world),
        ],
    ),
    # As published; ours are 3 log P, since counts travel with the indices.
    Exclusive: Formula(
        words=_exclusive_words,
        rounds=_times_log(4),
        asks=_exclusive_asks,
        compares=_own_part,
        band=_exclusive_band,
    ),
    PublishedThreshold: Formula(
        words=_published_words, rounds=_times_log(4), asks=_published_asks, compares=_own_part
    ),
    # As published; ours are 5 log P, since counts need no gather of their own.
    Deft: Formula(words=_deft_words, rounds=_times_log(6), asks=_deft_asks, compares=_norms_and_own_part),
    DeftPaper: Formula(
        words=_deft_paper_words, rounds=_times_log(6), asks=_deft_paper_asks, compares=_norms_and_own_part
    ),
    # As published, with balancing. Ours are P-1 + 3 ceil(log2 P), and P-1 more with balancing.
    Regional: Formula(
        words=_regional_words,
        rounds=lambda scheme, n, world, state: 2 * world + 2 * log2_ceil(world),
        asks=_regional_asks,
        compares=lambda scheme, world: 4.0,
        merges=1.35,
        band=_regional_band,
    ),
    SparDL: Formula(
        words=lambda scheme, n, world, state: scheme.expected_words(n, world, state),
        rounds=lambda scheme, n, world, state: scheme.expected_rounds(n, world, state),
        merges=1.6,
        band=_spardl_band,
    ),
}
