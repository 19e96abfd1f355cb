"""How a model is laid out in published checkpoints: names, parts, order of rows. Needs no torch.

A *part* is a box of one of our tensors and the box of a published tensor that holds the same
values. Parts cover both sides, so a tensor of either side can be put together from the other::

    ours       experts.gate [E, F, D]      attention.q_up.weight [heads * 96, 64]
                  | one part an expert        | one part, rows of each head in another order
    published  experts.0.gate_proj [F, D]  q_b_proj.weight [heads * 96, 64]
               experts.1.gate_proj [F, D]
               ...

The published form is that of the `transformers` library, which most tools read: `config.json`
beside `model.safetensors`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

Shape = tuple[int, ...]


class Placed(NamedTuple):
    """A part as it lies in one tensor: the tensor's name, and where the part starts in it."""

    name: str
    start: Shape


@dataclass(frozen=True)
class Part:
    """A box that one of our tensors and a published one have in common.

    Attributes:
        ours: Where it is in our tensor, which may have more leading dims; of those it is one index.
        theirs: Where it is in the published one.
        shape: Its shape, as it is there.
        order: Row ``i`` of ours is row ``order[i]`` of theirs; None: the same one.
    """

    ours: Placed
    theirs: Placed
    shape: Shape
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Layout:
    """All tensors of a model, on both sides.

    Attributes:
        parts: What they have in common; every element of either side is in one part.
        stays_float32: Published tensors that no export makes narrower.
        zeros: Our names that the model has not, because they would be zero.
    """

    parts: tuple[Part, ...]
    stays_float32: frozenset[str] = frozenset()
    zeros: frozenset[str] = frozenset()

    @cached_property
    def ours(self) -> dict[str, Shape]:
        """Shapes of our tensors by name."""
        shapes = _shapes((part.ours, part.shape) for part in self.parts)
        return {name: shape for name, shape in shapes.items() if name not in self.zeros}

    @cached_property
    def theirs(self) -> dict[str, Shape]:
        """Shapes of the published tensors by name."""
        return _shapes((part.theirs, part.shape) for part in self.parts)

    @cached_property
    def by_ours(self) -> Mapping[str, list[Part]]:
        """The parts of each of our tensors."""
        found = defaultdict(list)
        for part in self.parts:
            found[part.ours.name].append(part)
        return found

    @cached_property
    def by_theirs(self) -> Mapping[str, list[Part]]:
        """The parts of each published tensor."""
        found = defaultdict(list)
        for part in self.parts:
            found[part.theirs.name].append(part)
        return found


def _shapes(parts: Iterable[tuple[Placed, Shape]]) -> dict[str, Shape]:
    found: dict[str, Shape] = {}
    for (name, start), shape in parts:
        whole = (*(1 for _ in range(len(start) - len(shape))), *shape)
        end = tuple(a + n for a, n in zip(start, whole, strict=True))
        known = found.get(name, end)
        found[name] = tuple(max(a, b) for a, b in zip(known, end, strict=True))
    return found


def same(ours: str, theirs: str, *shape: int) -> Part:
    """Return the part of two tensors that are the same but for their names."""
    start = (0,) * len(shape)
    return Part(Placed(ours, start), Placed(theirs, start), shape)


def dense_parts(ours: str, theirs: str, inner: int, outer: int) -> list[Part]:
    """Return the parts of a gated feed-forward, ``inner`` wide inside and ``outer`` outside."""
    return [
        same(f"{ours}.gate.weight", f"{theirs}.gate_proj.weight", inner, outer),
        same(f"{ours}.up.weight", f"{theirs}.up_proj.weight", inner, outer),
        same(f"{ours}.down.weight", f"{theirs}.down_proj.weight", outer, inner),
    ]


@dataclass(frozen=True)
class Stacks:
    """How the experts of a layer are stored.

    Attributes:
        gate: Published name of expert ``{}``'s gate.
        up: Likewise.
        down: Likewise.
        gate_up: Published name of gate and up of all experts in one tensor ``[E, 2F, D]``.
        downs: Published name of all experts' down ``[E, D, F]``.
    """

    gate: str
    up: str
    down: str
    gate_up: str
    downs: str

    def parts(
        self, ours: str, *, num_experts: int, inner: int, outer: int, is_stacked: bool
    ) -> list[Part]:
        """Return the parts of the experts called ``ours``.

        Args:
            ours: Name of our stack.
            num_experts: Experts in it.
            inner: Width inside an expert.
            outer: Width of a token.
            is_stacked: In the form that newer versions of the library hold in memory, and save on
                request: one tensor for all experts. Otherwise one for each, the published form.
        """
        wide, narrow = (inner, outer), (outer, inner)
        if is_stacked:
            at = (0, 0, 0)
            up = Placed(self.gate_up, (0, inner, 0))
            return [
                Part(Placed(f"{ours}.gate", at), Placed(self.gate_up, at), (num_experts, *wide)),
                Part(Placed(f"{ours}.up", at), up, (num_experts, *wide)),
                Part(Placed(f"{ours}.down", at), Placed(self.downs, at), (num_experts, *narrow)),
            ]
        names = {"gate": (self.gate, wide), "up": (self.up, wide), "down": (self.down, narrow)}
        return [
            Part(Placed(f"{ours}.{leaf}", (e, 0, 0)), Placed(theirs.format(e), (0, 0)), shape)
            for leaf, (theirs, shape) in names.items()
            for e in range(num_experts)
        ]


@dataclass(frozen=True, kw_only=True)
class Published:
    """One model family in published form.

    Attributes:
        model_types: What ``config.json`` calls it.
        write: Our config -> entries of ``config.json`` that say what it computes.
        cannot_write: Our config -> what that form cannot say, one sentence each.
        read: ``config.json`` -> keyword arguments of our config, and what we cannot compute.
        layout: Our config, the names in the files, ``config.json`` -> how the tensors are laid
            out. Without names: as an export writes them.
    """

    model_types: tuple[str, ...]
    write: Callable[[Any], dict[str, Any]]
    cannot_write: Callable[[Any], list[str]]
    read: Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[str]]]
    layout: Callable[[Any, Iterable[str], Mapping[str, Any]], Layout]
