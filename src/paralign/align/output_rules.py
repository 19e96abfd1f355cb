"""What is said of plain outputs of modules, and of their gradients: by ``outputs=``.

A rank of a tensor-parallel layer returns some features, or a slice of the sequence, or a summand,
in a plain tensor that does not say which. ``outputs={"*.wq": {"tp": Shard(-1)}}`` says it, by the
names of modules; DTensors say it themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from paralign.align.name_rules import first_match
from paralign.align.placements import Placed, RankAxes
from paralign.align.sources.reader import Cut
from paralign.align.tensor_entry import Kind
from paralign.errors import ConfigError
from paralign.layout import Part, is_partial, local_boxes, shard_dim

OutputRule = Mapping[str, Mapping[str, Any]]
"""Name or pattern of modules -> mesh axis -> ``Shard(dim)`` or the dim, ``Replicate()``,
``Partial()``, or a :class:`paralign.layout.Part`."""


@dataclass(frozen=True)
class OutputRules:
    """Places plain outputs and their gradients.

    Args:
        axes: This rank's mesh axes.
        outputs: What outputs are.
        grads: What their gradients are, where these lie otherwise. Else a gradient is cut as its
            output is, and the same on ranks that hold the same of the output, or summands.
    """

    axes: RankAxes
    outputs: OutputRule = field(default_factory=dict)
    grads: OutputRule = field(default_factory=dict)

    def used(self, names: Iterable[str]) -> set[str]:
        """Return the patterns that match one of the modules ``names``."""
        each = [one for name in names for one in (name, f"{name}[0]")]  # of one tensor, or several
        found = {first_match(rules, name) for name in each for rules in (self.outputs, self.grads)}
        return {pattern for pattern in found if pattern is not None}

    def check(self) -> None:
        """Check the rules against the mesh.

        Raises:
            ConfigError: A rule names no axis of the mesh, or is no placement.
        """
        known = dict.fromkeys([*self.axes.run_axes, *self.axes.groups])
        problems = []
        for argument, rules in (("outputs", self.outputs), ("output_grads", self.grads)):
            for pattern, said in rules.items():
                problems += [
                    f"{argument}[{pattern!r}] names {axis!r}, which is no axis of mesh= "
                    f"({', '.join(known) or 'not given'})"
                    for axis in said
                    if axis not in known
                ]
                try:
                    for placement in said.values():
                        _part_of(placement)
                except ConfigError as error:
                    problems.append(f"{argument}[{pattern!r}]: {error}")
        if problems:
            raise ConfigError.from_problems("cannot place module outputs", problems)

    def place(self, kind: str, name: str, tensor: Tensor) -> Placed | None:
        """Return what a plain output or gradient is of the micro-batch's; None: nobody says.

        Args:
            kind: Output or gradient.
            name: The module's, with the place in what it returned, if that is not one tensor.
            tensor: The local tensor.
        """
        parts = self._parts(kind, name)
        if parts is None:
            return None
        shape = list(tensor.shape)
        cuts = []
        for axis, part in parts.items():
            dim = None if part.dim is None else shard_dim(Cut(part.dim), tensor.dim())
            if dim is not None:
                degree, at = self.axes.size(axis), self.axes.coordinates[axis]
                count = min(part.num_parts or degree, degree)
                cuts.append((Cut(dim), count, at * count // degree))
                shape[dim] *= count
        placements, sizes, coordinate = zip(*cuts, strict=True) if cuts else ((), (), ())
        return Placed(
            tensor.detach(),
            tuple(shape),
            local_boxes(shape, placements, sizes, coordinate, held_shape=tensor.shape),
            tuple(axis for axis, part in parts.items() if part == Part() and self._is_live(axis)),
            tuple(axis for axis, part in parts.items() if part.is_sum and self._is_live(axis)),
            "sum",
        )

    def _is_live(self, axis: str) -> bool:
        return self.axes.size(axis) > 1

    def _parts(self, kind: str, name: str) -> dict[str, Part] | None:
        if kind == Kind.OUTPUT_GRAD and (pattern := first_match(self.grads, name)) is not None:
            return {axis: _part_of(said) for axis, said in self.grads[pattern].items()}
        pattern = first_match(self.outputs, name)
        if pattern is None:
            return None
        parts = {axis: _part_of(said) for axis, said in self.outputs[pattern].items()}
        if kind == Kind.OUTPUT_GRAD:
            return {axis: replace(part, is_sum=False) for axis, part in parts.items()}
        return parts


def _part_of(said: Any) -> Part:
    if isinstance(said, Part):
        return said
    if isinstance(said, int) and not isinstance(said, bool):
        return Part(dim=said)
    if is_partial(said) and str(getattr(said, "reduce_op", "")) == "sum":
        return Part(is_sum=True)
    if type(said).__name__ == "Replicate":
        return Part()
    if type(said).__name__ == "Shard":
        return Part(dim=int(said.dim))
    raise ConfigError(
        f"{said!r} is no placement that an output can have. Use Shard(dim), Replicate(), Partial()"
    )
