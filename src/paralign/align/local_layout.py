"""Where each parameter's local tensor belongs, from all that is known: placements, rules, ranges.

What a rank holds of a parameter is found from inside out: the local tensor is a piece of a tensor
that FSDP or ZeRO has cut (a DTensor, or a flat range); that is a tp shard (by a rule, or as its
library says); and that may be a fused parameter, of which the name is one part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paralign.align.flat import flat_boxes
from paralign.align.fused import rows_of_part
from paralign.align.names import NamedParameter
from paralign.align.placements import RankAxes, is_dtensor
from paralign.align.shard_rules import ShardRules
from paralign.layout import Box, Interval, LocalMap, Span, boxes, whole


@dataclass(frozen=True)
class HeldPiece:
    """A piece of a named tensor: a view of local memory and what it is of the global tensor."""

    base: Tensor
    """View that holds the piece's rows, and of a fused tensor those of its other parts."""
    shape: tuple[int, ...]
    map: LocalMap
    replicated_over: tuple[str, ...] = ()
    partial_over: tuple[str, ...] = ()
    partial_op: str = "sum"
    dim: int = 0
    take: tuple[Interval, ...] | None = None
    """Rows of ``base`` along ``dim`` that are the piece, one interval per span; None: all."""

    @property
    def tensor(self) -> Tensor:
        """The piece as one tensor; of a fused tensor a copy, unless its rows are together."""
        if self.take is None:
            return self.base
        parts = [self.base.narrow(self.dim, a, b - a) for a, b in self.take]
        if len(parts) < 2:
            return parts[0] if parts else self.base.narrow(self.dim, 0, 0)
        return torch.cat(parts, self.dim)

    def views(self) -> list[tuple[Tensor, Box]]:
        """Return writable views of local memory, each with the box of the global tensor it is."""
        moved = {}
        if self.take is not None:
            spans = self.map[self.dim]
            moved = {s.local[0]: a for s, (a, _) in zip(spans, self.take, strict=True)}
        found = []
        for box in boxes(self.map):
            view = self.base
            for dim, (first, size) in enumerate(zip(box.local, box.shape, strict=True)):
                start = moved[first] if moved and dim == self.dim else first
                view = view.narrow(dim, start, size)
            found.append((view, box))
        return found


@dataclass(frozen=True)
class LocalLayouts:
    """Finds what this rank holds of each parameter.

    Args:
        axes: The rank's place on the mesh.
        rules: What the user or the library says of plain tensors.
    """

    axes: RankAxes
    rules: ShardRules

    def place(
        self,
        named: NamedParameter,
        tensor: Tensor,
        *,
        owned: tuple[int, int] | None = None,
        gathered: bool = False,
    ) -> list[HeldPiece]:
        """Return the pieces of ``named`` in ``tensor``: its values, gradient or optimizer state.

        Args:
            named: The parameter.
            tensor: A tensor of the parameter's local shape, or a DTensor, or a scalar.
            owned: The range of elements whose values are right here; others have theirs elsewhere.
            gathered: The tensor is what FSDP or ZeRO had cut, put together again.

        Raises:
            LayoutError: Placements are of a kind that cannot be described.
            ConfigError: A rule does not fit the tensor.
        """
        if tensor.dim() == 0 and named.parameter.dim() > 0:
            placed = self.axes.place(tensor)
            # FSDP1 leaves ranks that hold no elements without a state, so there are no set copies.
            copies = placed.replicated_over if named.flat is None else ()
            return [HeldPiece(placed.local, (), (), copies)]
        if given := self.rules.given(named, tensor):
            piece = HeldPiece(tensor.detach(), given.shape, given.map, given.replicated_over)
            return [self._fused(named, piece, given.map)]
        outer = self.rules.outer(named, self.axes)
        pieces = []
        for piece in self._inner(named, tensor, owned, gathered):
            shape, local_map = piece.shape, piece.map
            if outer is not None:
                shape, local_map = outer.shape, compose(outer.map, local_map)
            copies = tuple(
                axis for axis in piece.replicated_over if outer is None or axis not in outer.axes
            )
            whole_piece = replace(piece, shape=shape, map=local_map, replicated_over=copies)
            shard = whole(shape) if outer is None else outer.map
            pieces.append(self._fused(named, whole_piece, shard))
        return pieces

    def _inner(
        self,
        named: NamedParameter,
        tensor: Tensor,
        owned: tuple[int, int] | None,
        gathered: bool,
    ) -> Iterable[HeldPiece]:
        """Yield what the rank holds of the tensor that tp has left, whole or in ranges."""
        parameter, flat = named.parameter, named.flat
        if gathered and not is_dtensor(tensor):
            placed = self.axes.place(tensor)
            yield HeldPiece(placed.local, placed.shape, placed.map, placed.replicated_over)
        elif is_dtensor(tensor) or is_dtensor(parameter):
            placed = self.axes.place(tensor if is_dtensor(tensor) else parameter)
            local = placed.local if is_dtensor(tensor) else tensor.detach()
            yield HeldPiece(
                local,
                placed.shape,
                placed.map,
                placed.replicated_over,
                placed.partial_over,
                placed.partial_op,
            )
        elif flat is not None:
            values = tensor.detach().reshape(-1).narrow(0, flat.offset, flat.numel)
            copies = self.axes.replicas_outside(flat.ranks)
            yield from _ranges(values, flat.shape, flat.start, copies)
        elif owned is not None:
            start, stop = owned
            values = tensor.detach().reshape(-1)
            if values.numel() != stop - start:
                values = values[start:stop]
            copies = tuple(axis for axis in ("tp",) if axis in self.axes.run_axes)
            yield from _ranges(values, tuple(parameter.shape), start, copies)
        else:
            placed = self.axes.place(tensor)
            yield HeldPiece(placed.local, placed.shape, placed.map, placed.replicated_over)

    def _fused(self, named: NamedParameter, piece: HeldPiece, shard: LocalMap) -> HeldPiece:
        """Cut the named part out of a fused parameter."""
        if named.part is None:
            return piece
        dim = named.part.rule.dim % len(piece.shape)
        rows = rows_of_part(
            piece.map[dim], piece.shape[dim], named.part, named.source, shard=shard[dim]
        )
        shape = (*piece.shape[:dim], rows.size, *piece.shape[dim + 1 :])
        local_map = (*piece.map[:dim], rows.spans, *piece.map[dim + 1 :])
        return replace(piece, shape=shape, map=local_map, dim=dim, take=rows.take)


def compose(outer: LocalMap, inner: LocalMap) -> LocalMap:
    """Return what a piece is of the whole, which is ``inner`` of a part that is ``outer`` of it."""
    return tuple(
        tuple(_compose_dim(outer_spans, inner_spans))
        for outer_spans, inner_spans in zip(outer, inner, strict=True)
    )


def _compose_dim(outer: Sequence[Span], inner: Sequence[Span]) -> Iterable[Span]:
    for (local, _), (first, last) in inner:
        for (start, stop), (at, _) in outer:
            left, right = max(first, start), min(last, stop)
            if left < right:
                yield Span(
                    (local + left - first, local + right - first),
                    (at + left - start, at + right - start),
                )


def _ranges(
    values: Tensor, shape: tuple[int, ...], start: int, copies: tuple[str, ...]
) -> Iterable[HeldPiece]:
    """Yield a range of a tensor's elements, held in a row, as boxes."""
    for box in flat_boxes(shape, start, start + values.numel()):
        view = values.narrow(0, box.offset, math.prod(box.shape)).view(box.shape)
        yield HeldPiece(view, shape, box.map, copies)
