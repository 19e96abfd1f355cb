"""Where each parameter's local tensor belongs, from all that is known: placements, rules, ranges.

What a rank holds of a parameter is found from inside out: the local tensor is a piece of a tensor
that FSDP or ZeRO has cut (a DTensor, or a flat range); that is a tp shard (by a rule, or as its
library says); and that may be a fused parameter, of which the name is one part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from paralign.align.flat import flat_boxes
from paralign.align.fused import rows_of_part
from paralign.align.name_rules import first_match
from paralign.align.names import NamedParameter
from paralign.align.placements import Placed, RankAxes, is_dtensor
from paralign.align.sources.reader import Cut, Reader
from paralign.errors import ConfigError
from paralign.layout import Box, Interval, LocalMap, Span, boxes, local_boxes, local_shape, whole

ShardRule = Mapping[str, Mapping[str, Any]]
"""Name pattern -> mesh axis -> ``Shard(dim)`` (anything with ``dim``), or the dim."""
LayoutRule = Mapping[str, "Mapping[str, Any] | Callable[[Tensor], Mapping[str, Any]]"]
"""Name pattern -> ``{"shape": ..., "map": ...}`` as docs/trace.md describes them, or a function of
the local tensor that returns it."""


@dataclass(frozen=True)
class HeldPiece:
    """A piece of a named tensor: a view of local memory and what it is of the global tensor."""

    base: Tensor
    """View that holds the piece's rows, and of a fused tensor those of its other parts."""
    shape: tuple[int, ...]
    map: LocalMap
    replicated_over: tuple[str, ...]
    partial_over: tuple[str, ...]
    partial_op: str
    dim: int = 0
    take: tuple[Interval, ...] | None = None
    """Rows of ``base`` along ``dim`` that are the piece; None: all."""

    @property
    def tensor(self) -> Tensor:
        """The piece as one tensor; of a fused tensor a copy, unless its rows are together."""
        if self.take is None:
            return self.base
        if not self.take:
            return self.base.narrow(self.dim, 0, 0)
        parts = [self.base.narrow(self.dim, a, b - a) for a, b in self.take]
        return parts[0] if len(parts) == 1 else parts[0].new_empty(0).cat_to(parts)  # type: ignore

    def views(self) -> list[tuple[Tensor, Box]]:
        """Return writable views of local memory, each with the box of the global tensor it is."""
        found = []
        for box in boxes(self.map):
            start = list(box.local)
            if self.take is not None:
                at = 0
                for first, last in self.take:
                    if start[self.dim] == at:
                        start[self.dim] = first
                        break
                    at += last - first
            view = self.base
            for dim, (first, size) in enumerate(zip(start, box.shape, strict=True)):
                view = view.narrow(dim, first, size)
            found.append((view, box))
        return found
