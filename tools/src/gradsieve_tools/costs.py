"""THE model of costs: what an exchange takes, on the link and on the processor.

    link       every op of a step as it is carried: rounds times latency and words times seconds a word, by
               the function that chooses at run time how collectives go (`comm/rounds.py`). Copying bytes in
               and out of sockets goes on at the same time: the longer of the two counts
    computed   passes over memory, comparisons, the processor's part of each message, what a unit needs
               whatever its size

A scheme states what it asks for (`Scheme.asks`), how much it compares and how much it rounds; nothing here
knows a scheme by name. Training asks what it needs of the link in `gradsieve_tools.link_costs`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from gradsieve.comm.links import Links
from gradsieve.comm.ops import AllReduce, Meter, Op
from gradsieve.schemes.base import Scheme
from gradsieve.schemes.baselines.dense import Dense
from gradsieve_tools import formulas
from gradsieve_tools.link_costs import WORD, link_seconds, with_piggyback

PASS = 8.0  # bytes of memory traffic for one element copied: read and written
# Bytes of memory traffic for a word that a socket sends and one that it receives: dense's processor time over
# its words, at 14 GB/s (`step-mlp-1gbit-2026-11-15.json`: 165 ms for 38 million)
CARRIED = 64.0
# For a unit of ours besides all passes over it; for a word of what a rank selected, its index or its value,
# which is sorted and packed; and for one that it gets and adds up: 5 ms, 0.5 us and 0.06 us at 12 GB/s, by
# processor time of six schemes on 2 to 16 hosts (`benchmarks/plan_computed.py`, `plan-lab-2026-11-16.json`).
# As bytes, since hosts that move them faster run Python faster too.
HANDLED, GIVEN, TAKEN = 55e6, 6300.0, 700.0
# Kernels that a unit of ours launches on an accelerator: what the 5 ms of a CPU are at 20 us a launch. Of a
# transformer of 36 tensors torch's profiler counts 52 ops with stripes, 140 with ExDyna and 211 with top-k,
# besides our own kernels.
LAUNCHES = 250
# bit/s. Over links of rate R sums by NCCL took 1 + STALLED / R times as long as their bytes do; why is not
# known. Fitted to DiLoCo's exchanges on four hosts at 50 Mbit/s to 5 Gbit/s (`gpu-cluster-2026-08-16.json`),
# and a test fits it again.
STALLED = 14.5e6
CODED = 36.0  # bytes for an element that is rounded, summed and read again
# Times that the slowest pair must be behind the median to count: less is noise in what was measured
APART = 1.3


@dataclass(frozen=True, slots=True)
class Host:
    memory: float  # bytes a second, read and written
    selection: float  # elements a second that are compared with a threshold
    message: float  # processor seconds of a message
    carried: float = CARRIED  # 0: hosts carry the links' rate whatever it costs them
    # Seconds of a kernel launch on an accelerator, whose collectives are NCCL's; 0: a CPU, and gloo's
    launch: float = 0.0

    @property
    def unit(self) -> Cost:
        """Return what a unit of ours takes besides all passes over it."""
        return Cost(link=LAUNCHES * self.launch) if self.launch else Cost(computed=HANDLED / self.memory)


@dataclass(frozen=True, slots=True)
class Cost:
    # Seconds that leave to forward and backward what they compute on: on the link, and of an accelerator's
    # host that launches kernels
    link: float = 0.0
    computed: float = 0.0  # seconds of what forward and backward compute on
    words: float = 0.0
    rounds: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.link + other.link,
            self.computed + other.computed,
            self.words + other.words,
            self.rounds + other.rounds,
        )

    def times(self, count: float) -> Cost:
        return Cost(count * self.link, count * self.computed, count * self.words, round(count * self.rounds))


@dataclass(frozen=True, slots=True)
class Costs:
    world: int
    links: Links
    host: Host
    rings: Links | None = None  # where a ring is not as slow as the slowest pair

    @property
    def carrying(self) -> Links:
        """Return what the links are to messages of ours."""
        return self._carried(self.links)

    @property
    def around(self) -> Links:
        return self._carried(self.rings or self.links)

    def _carried(self, links: Links) -> Links:
        slower = 1 + STALLED / links.bandwidth if self.host.launch else 1.0
        return replace(links, word=slower * links.word)

    def of_ops(self, ops: Iterable[Op], ours: bool = True) -> Cost:
        """Return the cost of ops in sequence, without the scheme's computing; `ours`: through our engine."""
        cost = Cost()
        for op in ops:
            meter = Meter(0, self.world)
            meter.count(op)
            words = meter.moved / WORD
            carrying = self.host.carried * words / self.host.memory
            seconds = max(
                link_seconds([op], self.carrying if ours else self.around, self.world, ours), carrying
            )
            cost += Cost(seconds, self.host.message * meter.rounds, words, meter.rounds)
        return cost

    def of_scheme(self, scheme: Scheme[Any], n: int, units: int, passes: float) -> Cost:
        """An exchange of n elements in so many units, one after the other, and `passes` over memory."""
        return self._of_unit(scheme, -(-n // units), passes).times(units)

    def _of_unit(self, scheme: Scheme[Any], n: int, passes: float) -> Cost:
        ops = (
            []
            if scheme.no_comm
            else with_piggyback(formulas.asks(scheme, n, self.world), scheme, n, self.world)
        )
        compared = formulas.compared(scheme, n, self.world) / self.host.selection
        merged = formulas.formula_of(scheme).merges * sum(_merged(op, self.world) for op in ops)
        moved = merged + passes * PASS * n + CODED * formulas.coded(scheme, n)
        return self.host.unit + Cost(computed=compared + moved / self.host.memory) + self.of_ops(ops)


def _merged(op: Op, world: int) -> float:
    """Bytes of memory traffic that handling what a rank gives and gets costs as much as."""
    own = op.tensor.numel() * op.tensor.element_size() / WORD
    meter = Meter(0, world)
    meter.count(op)
    return GIVEN * own + TAKEN * (own if isinstance(op, AllReduce) else meter.moved / WORD)


def with_rings(links: Links, world: int) -> Links:
    """Return what the engine's own collectives cost at least, where it was not measured: gloo's rings."""
    hops = links.latency * (world - 1)
    return replace(links, gather=links.gather or hops, sum=links.sum or 2 * hops)


def dense_seconds(words: int, links: Links, world: int) -> float:
    return link_seconds(formulas.asks(Dense(), words, world), with_rings(links, world), world)
