"""What a scheme is: which elements travel, how, and what each rank pays.

Adding one is a file next to this one with the same four parts in the same order (docstring with numbered
recipe, the scheme's settings, its State, `step`) and one line in `schemes/__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic

import torch
from torch import Tensor

from gradsieve.comm.ops import AllReduce, Exchange, Op
from gradsieve.types import Ctx, Outcome, Program, Sparse, State, Vector, check_density, target_count


@dataclass(frozen=True)
class Stateless:
    """The state of a scheme that remembers nothing."""


@dataclass(frozen=True, kw_only=True)
class Seen(Stateless):
    """Figures of the last step, for reports only: no step depends on them."""

    longest: int = 0
    """Most elements that one rank selected."""
    mean: float = 0.0
    """Elements that a rank selected, on average."""
    union: int = 0
    """Elements in the update."""

    @property
    def imbalance(self) -> float:
        return self.longest / self.mean if self.mean else 1.0


def log2_ceil(world: int) -> int:
    """Rounds of the best broadcast or gather among `world` ranks."""
    return (world - 1).bit_length()


def blank(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """A tensor of that size and no content, for an op that nobody carries."""
    return torch.empty(count, dtype=dtype, device="meta")


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC, Generic[State]):
    """A frozen dataclass: its fields are its settings, its State travels through `step`."""

    density: float = 0.001
    """Share of the elements that travels each step."""

    lossless: ClassVar[bool] = False
    """True where every step spends everything: such a scheme needs no residual."""

    no_comm: ClassVar[bool] = False
    """True for the one scheme that never communicates."""

    reads_parts: ClassVar[bool] = False
    """True where `step` also takes a Vector, and reads of it only what it needs."""

    whole_model: ClassVar[bool] = False
    """True for published rules: papers apply them to the whole model, which is then one unit."""

    looks: ClassVar[float] = 5.0
    """What selecting costs, in comparisons of every element with a threshold: an exact top-k is about five
    (processor time in `step-mlp-1gbit-2026-11-15.json` and `step-exclusive-2026-11-16.json`)."""

    merges: ClassVar[float] = 1.0
    """How often what was selected is sorted, packed and added up on its way; 0 where it needs no index."""

    round_robin: ClassVar[bool] = False
    """True where every element is sent within 1/density steps: small tensors need no way of their own."""

    def __post_init__(self) -> None:
        check_density(self.density)

    @property
    def remembers(self) -> bool:
        """Whether what a step sends depends on the steps before it."""
        return not isinstance(self.begin(1, 1), Stateless)

    @property
    def is_whole(self) -> bool:
        """Whether all of the vector is exchanged as it is: density 1 is the dense exchange, whatever the
        scheme."""
        return self.density == 1.0 and not self.lossless

    def whole(self) -> Scheme[State]:
        """This scheme for one exchange of all of the vector, as it is."""
        return self if self.lossless else replace(self, density=1.0)

    @abstractmethod
    def begin(self, n: int, world: int, previous: State | None = None) -> State:
        """The state of a bucket of n elements before its first step.

        `previous` is a state of the layout before (DDP rebuilt its buckets, the world size changed): what
        holds for the whole model, such as a threshold, is kept.
        """

    def init_state(self, sizes: Sequence[int], world: int, previous: State | None = None) -> State:
        """`begin` for a unit made of tensors of these sizes; most schemes see one vector."""
        return self.begin(sum(sizes), world, previous)

    @abstractmethod
    def step(self, acc: Tensor, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        """One exchange. Reads `acc`, mutates nothing."""

    def apply(self, states: Sequence[State]) -> list[State]:
        """End of a step, with the new states of all buckets: what is decided for the whole model."""
        return list(states)

    def report(self, state: State) -> Mapping[str, float]:
        """Figures worth watching, where a scheme has them:

        threshold   above which elements are sent
        imbalance   the papers' f(t): the longest selection over the mean, before anything is cut
        demand      elements selected by all ranks, before anything is cut
        cut         share of the ranks that could not send all they selected

        and such as only one scheme has. docs/recording.md names all.
        """
        return {}

    @abstractmethod
    def expected_words(self, n: int, world: int, state: State | None = None) -> float:
        """Four-byte words that the busiest rank moves in one step, by the published formula.

        With the state after a step, at the count and the imbalance seen in it; without, at k and balanced.
        """

    @abstractmethod
    def expected_rounds(self, n: int, world: int, state: State | None = None) -> int:
        """Messages one after the other in that step, by the published formula."""

    def asks(self, n: int, world: int) -> Sequence[Op]:
        """What a converged and balanced step asks for, in tensors without content: costs are predicted from
        it.

        Here: the formula's words in the formula's rounds, as messages between two ranks.
        """
        rounds = self.expected_rounds(n, world)
        message = blank(round(self.expected_words(n, world) / max(1, rounds)))
        return [Exchange(message, 1, 1, message.numel())] * rounds

    def looked_at(self, n: int, world: int) -> float:
        """Comparisons with a threshold that a rank's selection costs as much as."""
        return self.looks * n

    def coded(self, n: int, world: int) -> int:
        """Elements that a rank rounds to few bits in a step."""
        return 0

    def words_band(self, n: int, world: int, state: State | None = None) -> tuple[float, float]:
        """Within which the words counted are as the formula says."""
        words = self.expected_words(n, world, state)
        return 0.9 * words, 1.1 * words

    def k(self, n: int) -> int:
        return target_count(self.density, n)

    def exchange(self, acc: Tensor | Vector, state: State, ctx: Ctx) -> Program[Outcome[State]]:
        """The entry point that every driver uses."""
        if self.reads_parts and not self.is_whole:
            return (yield from self.step(acc, state, ctx))  # type: ignore[arg-type]  # it takes both
        if not isinstance(acc, Tensor):
            acc = acc.between(0, acc.numel())
        if not self.is_whole:
            return (yield from self.step(acc, state, ctx))
        total = yield AllReduce(acc.clone())
        return Outcome(Sparse.full(total), Sparse.full(acc), state)
