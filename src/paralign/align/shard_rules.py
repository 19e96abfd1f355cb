"""What is said of plain local tensors: by ``shards=`` and ``layouts=``, or by their library.

``shards={"*.wq.weight": {"tp": Shard(0)}}`` is enough where every rank of the axis holds a
contiguous part; how large the others' parts are is exchanged once. ``layouts=`` says it in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paralign.align.name_rules import first_match
from paralign.align.names import NamedParameter
from paralign.align.placements import RankAxes, is_dtensor
from paralign.align.sources.choose import reader_of
from paralign.align.sources.reader import Cut, Reader
from paralign.errors import ConfigError
from paralign.layout import LocalMap, Span, local_boxes, local_shape, shard_dim, whole

Sizes = Mapping[str, Sequence[int]]
"""Name in the module -> local shape, of one rank."""

ShardRule = Mapping[str, Mapping[str, Any]]
"""Name or pattern -> mesh axis -> ``Shard(dim)`` (anything with ``dim``) or the dim."""

LayoutRule = Mapping[str, "Mapping[str, Any] | Callable[[Tensor], Mapping[str, Any]]"]
"""Name or pattern -> ``{"shape": ..., "map": ...}`` as docs/trace.md describes them, or a function
of the local tensor that returns it."""


@dataclass(frozen=True)
class Region:
    """What the rank holds of a tensor that plain tensors are cut from."""

    shape: tuple[int, ...]
    map: LocalMap
    axes: tuple[str, ...] = ()
    """Axes that cut it, so that they hold no copies."""
    replicated_over: tuple[str, ...] = ()
    """Axes that hold copies, where ``layouts`` says so."""


@dataclass
class ShardRules:
    """The rules, and what the ranks have told each other of the sizes they hold.

    Args:
        readers: Libraries to ask, in order.
        shards: The user's ``shards=``.
        layouts: The user's ``layouts=``.
    """

    readers: tuple[Reader, ...]
    shards: ShardRule = field(default_factory=dict)
    layouts: LayoutRule = field(default_factory=dict)
    sizes: dict[int, Sizes] = field(default_factory=dict)
    """Per rank."""
    alone: bool = False
    """The run has one rank, so that an axis it does not name has size 1 and cuts nothing."""

    def used(self, parameters: Sequence[NamedParameter]) -> set[str]:
        """Return the patterns that match one of ``parameters``."""
        found = [
            first_match(rules, named.source, named.name)
            for rules in (self.shards, self.layouts)
            for named in parameters
        ]
        return {pattern for pattern in found if pattern is not None}

    def own_sizes(self, parameters: Sequence[NamedParameter]) -> dict[str, list[int]]:
        """Return what the other ranks need to know: the shapes of this rank's tp shards."""
        return {named.source: list(_uncut_shape(named)) for named in parameters if self.cuts(named)}

    def cuts(self, named: NamedParameter) -> dict[str, Cut]:
        """Return how mesh axes cut the parameter, outermost first.

        Raises:
            ConfigError, LayoutError: A rule is not a placement, or names a dim that is not there.
        """
        pattern = first_match(self.shards, named.source, named.name)
        if pattern is None:
            given = reader_of(self.readers, named.parameter).cuts(named.parameter)
        else:
            given = self.shards[pattern]
        num_dims = len(_uncut_shape(named))
        found = {}
        for axis, placement in given.items():
            asked = Cut(placement) if isinstance(placement, int) else placement
            dim = shard_dim(asked, num_dims)
            if dim is not None:
                found[axis] = Cut(dim, int(getattr(asked, "split_factor", 1)))
        return found

    def given(self, named: NamedParameter, tensor: Tensor) -> Region | None:
        """Return what ``layouts`` says of the parameter's local tensor.

        Raises:
            ConfigError: It is not a layout, or does not fit the tensor.
        """
        pattern = first_match(self.layouts, named.source, named.name)
        if pattern is None:
            return None
        rule = self.layouts[pattern]
        said = rule(tensor) if callable(rule) else rule
        try:
            shape = tuple(int(size) for size in said["shape"])
            spans = said["map"]
            held = tuple(tuple(Span((a, b), (c, d)) for a, b, c, d in dim) for dim in spans)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"layouts[{pattern!r}]={said!r} must be a mapping with 'shape' and 'map', as "
                f"docs/trace.md describes them ({error!r})."
            ) from error
        if local_shape(held) != tuple(tensor.shape):
            raise ConfigError(
                f"layouts[{pattern!r}] describes a local tensor of shape {local_shape(held)}, but "
                f"{named.source!r} has {tuple(tensor.shape)}. Its map must cover the local tensor."
            )
        return Region(shape, held, replicated_over=tuple(said.get("replicated_over", ())))

    def outer(self, named: NamedParameter, axes: RankAxes) -> Region | None:
        """Return which part of the whole parameter the tp shard is; None if it is all of it.

        Raises:
            ConfigError: An axis is not on the mesh, or cannot have cut the tensor like this.
        """
        known = dict.fromkeys([*axes.run_axes, *axes.groups])
        cuts = {
            axis: cut for axis, cut in self.cuts(named).items() if axis in known or not self.alone
        }
        if not cuts:
            return None
        for axis in cuts:
            if axis not in known:
                raise ConfigError(
                    f"{named.source!r} is cut over {axis!r}, which is no axis of mesh= "
                    f"({', '.join(known) or 'not given'}). Pass the mesh, or "
                    f"mesh={{{axis!r}: (index, size), ...}}."
                )
        parameter: Any = named.parameter
        if is_dtensor(parameter):
            inside = set(cuts) & set(axes.names_of(parameter.device_mesh))
            if inside:
                raise ConfigError(
                    f"{named.source!r} is a DTensor over {', '.join(sorted(inside))} already, so "
                    "shards= must not say it again. Leave it out."
                )
        held = _uncut_shape(named)
        shape, local_map = list(held), list(whole(held))
        for dim in {cut.dim for cut in cuts.values()}:
            on_dim = {axis: cut for axis, cut in cuts.items() if cut.dim == dim}
            shape[dim], local_map[dim] = self._cut_dim(named.source, held, dim, on_dim, axes)
        return Region(tuple(shape), tuple(local_map), tuple(cuts))

    def _cut_dim(
        self,
        source: str,
        held: tuple[int, ...],
        dim: int,
        cuts: Mapping[str, Cut],
        axes: RankAxes,
    ) -> tuple[int, tuple[Span, ...]]:
        """Return the global size of a dim and where the rank's part of it lies."""
        ((axis, cut), *more) = cuts.items()
        if not more and cut.split_factor == 1:
            parts = [self.sizes.get(rank, {}).get(source, held)[dim] for rank in axes.groups[axis]]
            first = sum(parts[: axes.coordinates[axis]])
            span = Span((0, held[dim]), (first, first + held[dim]))
            return sum(parts), (span,) if held[dim] else ()
        size = held[dim]
        for name in cuts:
            size *= axes.size(name)
        (spans,) = local_boxes(
            (size,),
            [Cut(0, cut.split_factor) for cut in cuts.values()],
            [axes.size(name) for name in cuts],
            [axes.coordinates[name] for name in cuts],
            held_shape=(held[dim],),
        )
        return size, spans


def _uncut_shape(named: NamedParameter) -> tuple[int, ...]:
    """Shape of the tp shard, before FSDP has cut it."""
    return tuple(named.parameter.shape) if named.flat is None else named.flat.shape
