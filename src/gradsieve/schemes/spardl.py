"""SparDL (arXiv 2304.00737): sparse reduce-scatter, residuals of everything dropped on the way, all-gather.

P ranks form d teams of Q = P/d; rank = team Q + place. The vector has Q blocks, one for each place.

1. Spar-Reduce-Scatter: ceil(log2 Q) rounds. With gap 2^i, i falling, place w sends its blocks from w + gap on
   to place w + gap, each cut down to its k/Q largest elements first, all in one message; what it receives is
   added to the blocks it still holds. In the end it holds the team's sum of block w.
2. Spar-All-Gather between the same places of the teams. R-SAG: log2 d rounds of exchanging, adding and
   cutting down by pairs. B-SAG: h elements of all teams gathered, added, cut down; h learns how many fit.
3. All-gather of the blocks inside the team, ceil(log2 Q) rounds.
4. Global residual collection: an element stays in the residual of a rank that did not choose it (local); of
   its first owner, if it is not in the end result (end); what others had added to it, of the rank that
   dropped the sum (in-procedure).

A block's elements that can be among its largest are looked for once (`candidates`); from then on all work is
on short lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from gradsieve.comm import rounds
from gradsieve.comm.links import Links, measure_links
from gradsieve.comm.ops import Exchange
from gradsieve.errors import ConfigError
from gradsieve.schemes.base import Scheme, log2_ceil
from gradsieve.schemes.block_buffers import BlockBuffers, Entries
from gradsieve.schemes.shares import quota
from gradsieve.types import Ctx, Outcome, Program, Sparse, private

Residuals = Literal["local", "end", "all"]
Across = Literal["r-sag", "b-sag"]


@dataclass(frozen=True, kw_only=True)
class State:
    n: int
    # d; 0 while it is still to be chosen.
    teams: int
    # h of B-SAG, the same at the same place of all teams; 0 before the first step.
    kept: int = private(0)
    # By how much h changes next.
    move: int = private(0)
    # 1 if the last change went the right way: the next one that does is twice as large.
    confirmed: int = private(0)


@dataclass(frozen=True, kw_only=True)
class SparDL(Scheme[State]):
    # d, which divides the number of ranks; more teams mean fewer rounds and more words. "auto" measures
    # latency and bandwidth in the first step.
    teams: int | Literal["auto"] = 1
    # How teams exchange; R-SAG needs a power of two of them.
    across: Across = "b-sag"
    # What is collected; all but "all" lose gradient, for ablation only.
    residuals: Residuals = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teams != "auto" and not isinstance(self.teams, int):
            raise ConfigError(f"teams must be a whole number or 'auto', not {self.teams!r}")
        if self.across not in get_args(Across):
            raise ConfigError(f"across must be one of {get_args(Across)}, not {self.across!r}")
        if self.residuals not in get_args(Residuals):
            raise ConfigError(f"residuals must be one of {get_args(Residuals)}, not {self.residuals!r}")

    @property
    def remembers(self) -> bool:
        return self.teams != 1

    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        if self.teams == "auto":
            return State(n=n, teams=previous.teams if previous and not world % max(previous.teams, 1) else 0)
        if self.teams < 1 or world % self.teams:
            raise ConfigError(f"{world} ranks cannot form {self.teams} teams of equal size")
        if self.across == "r-sag" and self.teams & (self.teams - 1):
            raise ConfigError(f"R-SAG needs a power of two teams, not {self.teams}: use across='b-sag'")
        return State(n=n, teams=self.teams)

    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        if not state.teams:
            links = yield from measure_links(ctx, acc.device)
            state = replace(state, teams=self.best_teams(state.n, ctx.world, links))
        places = ctx.world // state.teams
        team, place = divmod(ctx.rank, places)
        quotas = self.quotas(state.n, places, ctx.step)
        buffers = BlockBuffers(acc, places, quotas, self.candidates(quotas))
        # 1.
        yield from _reduce_scatter(buffers, place, team * places)
        # 2.
        if state.teams == 1:
            block = buffers.cut(place, 1)
        elif self.across == "r-sag":
            block = yield from _recursive(buffers, place, team, state.teams)
        else:
            block, state = yield from self._bruck(buffers, place, team, state)
        # 3.
        ranks = range(team * places, team * places + places)
        mine = buffers.pack(block, place, int(quotas[place]))
        gathered = yield from rounds.gather(mine, place, ranks, (2 * quotas).tolist())
        final = buffers.unpack(gathered, 0, places, f"of all blocks in step {ctx.step}")
        # 4.
        return Outcome(
            Sparse(final.indices, final.values, state.n), buffers.spent(final.indices, self.residuals), state
        )

    def quotas(self, n: int, places: int, step: int) -> Tensor:
        """Returns how many elements each block may send."""
        even = torch.ones(places, dtype=torch.float64, device="cpu")
        return quota(even, self.k(n), step)

    def part(self, n: int, places: int) -> int:
        """Returns a block's part of k."""
        return max(1, self.k(n) // places)

    def candidates(self, quotas: Tensor) -> int:
        """Returns how many elements of a block are looked at."""
        return int(quotas.max())

    def first_move(self, part: int, kept: int) -> int:
        """Returns by how much h of B-SAG changes first. Published, it stays 0 where a block has fewer than a
        hundred elements to send, and h never moves."""
        return max(1, (part - kept) // 100)

    def _bruck(
        self, buffers: BlockBuffers, place: int, team: int, state: State
    ) -> Program[tuple[Entries, State]]:
        """Runs B-SAG. The published h has no upper bound; here it stays within the block's part of k."""
        part = self.part(state.n, buffers.places)
        least = max(1, part // state.teams)
        kept = state.kept or least
        move = state.move or self.first_move(part, kept)
        size = min(kept, int(buffers.quotas[place]))
        own = buffers.cut(place, 1, limit=size)
        ranks = range(place, state.teams * buffers.places, buffers.places)
        gathered = yield from rounds.gather(
            buffers.pack(own, place, size), team, ranks, [2 * size] * state.teams
        )
        union = buffers.merged(gathered.view(state.teams, -1), place)
        fits = union.indices.numel() <= part
        if fits == (move > 0):
            move, confirmed = (2 * move, 0) if state.confirmed else (move, 1)
        else:
            move, confirmed = int(-move / 2) if abs(move) > 1 else -move, 0
        new = replace(state, kept=min(max(kept + move, least), part), move=move, confirmed=confirmed)
        block, _ = buffers.largest(union, place)
        return block, new

    def best_teams(self, n: int, world: int, links: Links) -> int:
        """Returns the number of teams that divides the ranks and is quickest by the cost formulas."""

        def seconds(teams: int) -> float:
            state = State(n=n, teams=teams)
            return links.seconds(self.expected_rounds(n, world, state), self.expected_words(n, world, state))

        divisors = [d for d in range(1, world + 1) if world % d == 0]
        if self.across == "r-sag":
            divisors = [d for d in divisors if not d & (d - 1)]
        return min(divisors, key=seconds)

    def report(self, state: State) -> Mapping[str, float]:
        return {"teams": float(state.teams)}

    def expected_words(self, n: int, world: int, state: State | None = None) -> float:
        k, d = self.k(n), (state or self.begin(n, world)).teams or 1
        inside = 4.0 * k * (world - d) / world
        if self.across == "r-sag":
            return inside + 2.0 * k * d * log2_ceil(d) / world
        kept = state.kept if state and state.kept else k * (d + 1) / (2 * world)  # between k/P and k d/P
        return inside + 2.0 * (d - 1) * kept

    def expected_rounds(self, n: int, world: int, state: State | None = None) -> int:
        d = (state or self.begin(n, world)).teams or 1
        return 2 * log2_ceil(world // d) + log2_ceil(d)


def _reduce_scatter(buffers: BlockBuffers, place: int, first_rank: int) -> Program[None]:
    """A message of a round has room for as many blocks as the gap, in the first round for those beyond it."""
    places = buffers.places
    for power in reversed(range(log2_ceil(places))):
        gap = 1 << power
        size = min(gap, places - gap)
        to, source = (place + gap) % places, (place - gap) % places
        message = buffers.pack(buffers.cut(to, size), to, buffers.buffer(to, size))
        reply = yield Exchange(message, first_rank + to, first_rank + source, 2 * buffers.buffer(place, size))
        buffers.add(buffers.unpack(reply, place, size, f"from place {source}"))


def _recursive(buffers: BlockBuffers, place: int, team: int, teams: int) -> Program[Entries]:
    """Runs R-SAG. What is dropped in round s is dropped by 2^(s+1) teams alike: each keeps its share of
    it."""
    block, buffer = buffers.cut(place, 1), int(buffers.quotas[place])
    for power in range(log2_ceil(teams)):
        partner = team ^ (1 << power)
        message = buffers.pack(block, place, buffer)
        other = partner * buffers.places + place
        reply = yield Exchange(message.clone(), other, other, 2 * buffer)
        pair = torch.stack([message, reply] if team < partner else [reply, message])
        union = buffers.merged(pair, place)
        block, dropped = buffers.largest(union, place)
        alike = 2 << power
        share = dropped.values / alike
        if team % alike == 0:  # the remainder, where a share is too small to be represented
            share = dropped.values - share * (alike - 1)
        buffers.drop(Entries(dropped.indices, share))
    return block
