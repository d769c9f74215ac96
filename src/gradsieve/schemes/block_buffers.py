"""SparDL's working set of one step: which elements of which blocks a rank holds, has sent, has dropped.

Short lists of (index, value) only; the vector itself is read once, for candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve.kernels import candidates as find_candidates
from gradsieve.kernels import largest_of_each, sum_by_index
from gradsieve.types import Sparse
from gradsieve.wire.check import strictly_increasing
from gradsieve.wire.pairs import from_pairs, to_pairs


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries are elements of the vector, sorted by index; block by block where they pass its end."""

    indices: Tensor
    values: Tensor


class BlockBuffers:
    """The vector has `places` blocks of equal length, the last one shorter; block b may send quotas[b]
    elements.

    `candidates` of a block's own elements are looked at: as many as may be sent and as may be received for it
    make every choice exact, since what is received can only take the place of, or cancel, that many.
    """

    def __init__(self, acc: Tensor, places: int, quotas: Tensor, candidates: int) -> None:
        self.acc, self.places, self.quotas = acc, places, quotas.to(acc.device)
        self.n = acc.numel()
        self.length = max(1, -(-self.n // places))
        self._candidates = find_candidates(acc, self.length, candidates)
        nothing = Entries(self._candidates[:0], acc[:0])
        self._received = nothing
        self._chosen: list[Tensor] = []
        self._dropped = [nothing]

    def buffer(self, first: int, size: int) -> int:
        """Returns how many elements `size` blocks from `first` on may send."""
        return int(self.quotas.roll(-first)[:size].sum())

    def _ahead(self, indices: Tensor, first: int) -> Tensor:
        """Says how many blocks after `first` the block of each index comes, cyclically."""
        return (indices // self.length - first) % self.places

    def pack(self, entries: Entries, first: int, buffer: int) -> Tensor:
        """Writes a message of the blocks from `first` on, with capacity for so many elements: pairs of index
        and value bits. Places without an element hold index n, which is nowhere."""
        pairs = to_pairs(entries.indices, entries.values, self.n)
        message = pairs.new_full((buffer, 2), self.n)
        message[self._slots(entries, first)] = pairs
        return message.flatten()

    def unpack(self, message: Tensor, first: int, size: int, what: str) -> Entries:
        """Reads the entries of the `size` blocks from `first` on, in cyclic order, and checks them."""
        pairs = message.view(-1, 2)
        indices, values = from_pairs(pairs[pairs[:, 0] != self.n], self.acc.dtype)
        span = self.length * self.places
        ahead = (indices - first * self.length) % span
        ahead[(indices < 0) | (indices > self.n)] = span
        strictly_increasing(ahead, self.length * size, f"indices {what}, counted from block {first} on,")
        return Entries(indices, values)

    def _slots(self, entries: Entries, first: int) -> Tensor:
        """Says where each entry stands in a message of the blocks from `first` on."""
        ahead = self._ahead(entries.indices, first)
        buffer = self.quotas.roll(-first)
        counts = torch.bincount(ahead, minlength=self.places)
        skipped = (buffer.cumsum(0) - buffer) - (counts.cumsum(0) - counts)
        return torch.arange(ahead.numel(), dtype=torch.long, device=ahead.device) + skipped[ahead]

    def cut(self, first: int, size: int, limit: int | None = None) -> Entries:
        """Cuts the `size` blocks from `first` on down to their largest elements, in the blocks' cyclic order.

        What is chosen counts as sent; what others had added to the rest is dropped here.
        """
        arrived = self._ahead(self._received.indices, first) < size
        extra = Entries(self._received.indices[arrived], self._received.values[arrived])
        own = self._candidates[self._ahead(self._candidates, first) < size]
        indices = torch.unique(torch.cat([own, extra.indices]))
        values = self.acc[indices]
        values[torch.searchsorted(indices, extra.indices)] += extra.values
        ahead, order = self._ahead(indices, first).sort(stable=True)
        indices, values = indices[order], values[order]
        counts = self.quotas.roll(-first)
        chosen = largest_of_each(values.abs(), ahead, counts if limit is None else counts.clamp(max=limit))
        picked = Entries(indices[chosen], values[chosen])
        lost = ~torch.isin(extra.indices, picked.indices)
        self.drop(Entries(extra.indices[lost], extra.values[lost]))
        self._chosen.append(picked.indices)
        return picked

    def add(self, entries: Entries) -> None:
        """Adds what was received to the blocks still held."""
        indices = torch.cat([self._received.indices, entries.indices])
        values = torch.cat([self._received.values, entries.values])
        self._received = Entries(*sum_by_index(indices, values, self.n))

    def drop(self, entries: Entries) -> None:
        """Notes a sum that this rank dropped: what it has to do with it must not be lost."""
        self._dropped.append(entries)

    def merged(self, messages: Tensor, place: int) -> Entries:
        """Adds several messages about one block up, in the order of the rows."""
        parts = [
            self.unpack(row, place, 1, f"of block {place} from team {team}")
            for team, row in enumerate(messages)
        ]
        indices, values = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("indices", "values")
        )
        return Entries(*sum_by_index(indices, values, self.n))

    def largest(self, union: Entries, place: int) -> tuple[Entries, Entries]:
        """Cuts a block down to its part of k, and returns what that drops as well."""
        chosen = largest_of_each(
            union.values.abs(), torch.zeros_like(union.indices), self.quotas[place : place + 1]
        )
        rest = torch.ones_like(union.indices, dtype=torch.bool)
        rest[chosen] = False
        kept = Entries(union.indices[chosen], union.values[chosen])
        return kept, Entries(union.indices[rest], union.values[rest])

    def spent(self, final: Tensor, residuals: str) -> Sparse:
        """Returns this rank's part of the result, by the kinds of residual that are collected."""
        chosen = torch.cat(self._chosen).sort().values
        if residuals == "local":
            return Sparse(chosen, self.acc[chosen], self.n)
        values = torch.where(torch.isin(final, chosen), self.acc[final], 0.0)
        if residuals == "all":
            indices = torch.cat([entries.indices for entries in self._dropped])
            amounts = torch.cat([entries.values for entries in self._dropped])
            there = torch.isin(indices, final)
            values.index_add_(0, torch.searchsorted(final, indices[there]), amounts[there], alpha=-1)
        return Sparse(final, values, self.n)
