"""The largest few of every chunk as bytes, as SparseLoCo and DeMo send them.

A message: the places of all chunks, by whichever of the library's codecs writes so many in the fewest bytes
(Elias-Fano mostly: 8 bits a place for 64 of 4,096, which have 7.4 bits of entropy); then the values, by one
of the library's codecs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradsieve.schemes import INDEX_CODECS, VALUE_CODECS, Values


@dataclass(frozen=True, slots=True)
class Entries:
    chunks: int
    width: int
    k: int
    values: Values

    @property
    def count(self) -> int:
        return self.chunks * self.k

    @property
    def span(self) -> int:
        return self.chunks * self.width

    @property
    def size(self) -> int:
        """Bytes of a message."""
        return self._places_size + VALUE_CODECS[self.values].predict_size(self.count, torch.float32)

    @property
    def _codec(self) -> Any:
        return min(INDEX_CODECS, key=lambda codec: codec.predict_size(self.count, self.span))

    @property
    def _places_size(self) -> int:
        return int(self._codec.predict_size(self.count, self.span))

    def encode(self, rows: Tensor) -> Tensor:
        best = rows.abs().topk(self.k, dim=1, sorted=False).indices.sort(1).values
        first = torch.arange(self.chunks, dtype=torch.int64, device=rows.device)[:, None] * self.width
        places = (best + first).flatten()
        coded = self._codec.encode(places, places.new_tensor(self.count), self.count, self.span)
        return torch.cat([coded, VALUE_CODECS[self.values].encode(rows.flatten()[places])])

    def decode(self, message: Tensor) -> Tensor:
        """Rows in which all else is 0."""
        coded, rest = message[: self._places_size], message[self._places_size :].contiguous()
        found = self._codec.decode(coded[None].cpu().numpy(), np.array([self.count]), self.count, self.span)
        values = VALUE_CODECS[self.values].decode(rest, self.count, torch.float32)
        flat = values.new_zeros(self.span)
        flat[torch.from_numpy(found).to(values.device)] = values
        return flat.view(self.chunks, self.width)
