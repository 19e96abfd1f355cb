"""One trace as the checks read it: pieces by kind, step and name, and the ranks by axis."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paralign.align.budget import (
    EPS,
    FP64_AFTER_STEP,
    FP64_LOSS,
    FP64_TENSOR,
    TRUTH_AFTER_FACTOR,
    UNCALIBRATED_EPS,
    ZERO_IN_THEORY,
)
from paralign.align.inspect.fingerprint import Fingerprint, norm_of_sum, take_fingerprint
from paralign.align.trace import Kind, TensorEntry
from paralign.align.trace_reader import TraceReader

LAYER = re.compile(r"^(.*?\.)(\d+)(\..+)$")
OF_STAGE = " (stage "
"""Follows the name of a tensor of a stage that numbers its layers from 0."""


@dataclass(frozen=True)
class Held:
    """One rank's piece of a tensor."""

    rank: int
    entry: TensorEntry

    @property
    def place(self) -> Hashable:
        """What the piece is of the whole; equal for replicas."""
        return self.entry.map, self.entry.flat


@dataclass(frozen=True)
class Split:
    """How the ranks fall apart when each says something and not all say the same."""

    axes: tuple[str, ...]
    """Axes along which peers differ."""
    classes: tuple[tuple[int, ...], ...]
    """Ranks that say the same, the largest class first."""
    loners: tuple[int, ...]
    """The few ranks that are alone against a majority of all others; empty if there is none."""


class View:
    """A trace with everything that more than one check asks of it."""

    def __init__(self, reader: TraceReader, *, unused: Sequence[str] = ()) -> None:
        self.reader = reader
        self._unused = tuple(unused)
        self.world_size = reader.world_size
        self.steps = tuple(reader.facts.steps)
        named = str(reader.facts.run.get("compute_dtype"))
        self.dtype = named if named in EPS else "float32"
        self._groups: dict[tuple[int, str, str | None], dict[str, list[Held]]] = {}
        for index in reader.ranks:
            for entry in index.tensors:
                moment = (entry.step, entry.kind, entry.state)
                by_name = self._groups.setdefault(moment, {})
                by_name.setdefault(entry.name, []).append(Held(index.rank, entry))
        self.axes = _own_axes(reader)
        self._fingerprints: dict[tuple[str, str], Fingerprint] = {}
        self._norms: dict[int, dict[str, float]] = {}
        self._noise: dict[int, frozenset[str]] = {}
        self._reached: dict[tuple[int, tuple[str, ...]], frozenset[int]] = {}
        self._tell_stages_apart()

    @property
    def eps(self) -> float:
        """Machine epsilon of the run's compute dtype."""
        return EPS[self.dtype]

    def tolerance(self, *, after_step: bool) -> float:
        """Return how far two roundings of the same tensor may be apart, relatively."""
        if self.dtype == "float64":
            return FP64_AFTER_STEP.value if after_step else FP64_TENSOR.value * self.eps
        factor = TRUTH_AFTER_FACTOR.value if after_step else 1.0
        return UNCALIBRATED_EPS[self.dtype].value * self.eps * factor

    def scalar_tolerance(self, kind: str) -> float:
        """Return how far two roundings of the same loss or norm may be apart, relatively."""
        if self.dtype == "float64" and kind == "loss":
            return FP64_LOSS.value
        return self.tolerance(after_step=False)

    def states(self, step: int) -> list[str | None]:
        """Return the names of the optimizer states recorded after ``step``."""
        return sorted(
            {state for at, kind, state in self._groups if at == step and kind == "moment"},
            key=str,
        )

    def tensors(self, kind: str, step: int, state: str | None = None) -> dict[str, list[Held]]:
        """Return every rank's pieces by name, in the order of the model."""
        return self._groups.get((step, kind, state), {})

    def before(self, step: int) -> dict[str, list[Held]]:
        """Return the parameters that ``step`` began with."""
        return self.tensors("param_after", step - 1) or self.tensors("param", step)

    def fingerprint(self, held: Held) -> Fingerprint:
        """Return the fingerprint of a piece that has a payload; each piece is read once."""
        entry = held.entry
        assert entry.file is not None and entry.key is not None, "there is no tensor to read"
        key = (entry.file, entry.key)
        if key not in self._fingerprints:
            self._fingerprints[key] = take_fingerprint(self.reader, entry)
        return self._fingerprints[key]

    def gradient_norms(self, step: int) -> dict[str, float]:
        """Return the norm of every gradient of ``step``, each place counted once."""
        if step not in self._norms:
            self._norms[step] = {
                name: math.hypot(*self.place_norms(held).values())
                for name, held in self.tensors(Kind.GRAD, step).items()
            }
        return self._norms[step]

    def place_norms(self, held: Iterable[Held]) -> dict[Hashable, float]:
        """Return the norm of each distinct piece; of copies that differ, the largest."""
        norms: dict[Hashable, float] = {}
        summands: dict[tuple[frozenset[int], Hashable], list[TensorEntry]] = {}
        for piece in held:
            if piece.entry.file is None:
                continue
            if piece.entry.partial_over:
                group = self.reach(piece.rank, piece.entry.partial_over)
                summands.setdefault((group, piece.place), []).append(piece.entry)
                continue
            norm = self.fingerprint(piece).norm
            norms[piece.place] = max(norm, norms.get(piece.place, 0.0))
        for (_, place), entries in summands.items():
            norm = norm_of_sum(self.reader, entries)
            norms[place] = max(norm, norms.get(place, 0.0))
        return norms

    def noise_names(self, step: int) -> frozenset[str]:
        """Return the parameters whose gradient is the rounding of something that cancels."""
        if step not in self._noise:
            norms = self.gradient_norms(step)
            limit = ZERO_IN_THEORY.value * self.eps * math.hypot(*norms.values())
            small = frozenset(name for name, norm in norms.items() if 0 < norm <= limit)
            self._noise[step] = small
        return self._noise[step]

    def coordinate(self, rank: int, axis: str) -> int:
        """Return a rank's index on an axis; 0 where it is not on it."""
        return self.reader.ranks[rank].coordinates.get(axis, 0)

    def group(self, rank: int, axis: str) -> list[int]:
        """Return the ranks of ``rank``'s group on an axis, itself included."""
        return self.reader.ranks[rank].axes.get(axis, [rank])

    def reach(self, rank: int, axes: Iterable[str]) -> frozenset[int]:
        """Return the ranks that differ from ``rank`` only along ``axes``, itself included."""
        key = (rank, tuple(axes))
        if key not in self._reached:
            reached, queue = {rank}, [rank]
            while queue:
                at = queue.pop()
                new = {peer for axis in key[1] for peer in self.group(at, axis)} - reached
                reached |= new
                queue += new
            self._reached[key] = frozenset(reached)
        return self._reached[key]

    def split(self, said: Mapping[int, Hashable], prefer: Sequence[str] = ()) -> Split | None:
        """Return how ranks fall apart by what each of them said; None if they all agree.

        Args:
            said: What each rank says; ranks that say nothing are left out.
            prefer: Of two axes with the same groups, the one to name.
        """
        classes: dict[Hashable, list[int]] = {}
        for rank, value in said.items():
            classes.setdefault(value, []).append(rank)
        if len(classes) < 2:
            return None
        ordered = sorted(classes.values(), key=lambda ranks: (-len(ranks), ranks))
        loners: list[int] = []
        others = sum(map(len, ordered[1:]))
        if len(ordered[0]) > 2 * others or (others == 1 and len(ordered[0]) == 2):
            loners = sorted(rank for ranks in ordered[1:] for rank in ranks)
        return Split(
            tuple(self._differing_axes(said, prefer)),
            tuple(tuple(sorted(ranks)) for ranks in ordered),
            tuple(loners),
        )

    def may_be_unused(self, name: str) -> bool:
        """Whether the user said that a parameter need not have a gradient."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._unused)

    def where(self, name: str) -> dict[str, Any] | None:
        """Return the module that owns a parameter."""
        name = name.partition(OF_STAGE)[0]
        for index in self.reader.ranks:
            if name in index.modules:
                return dict(index.modules[name])
        return None

    def _tell_stages_apart(self) -> None:
        """Where stages number their layers from 0 each, equal names mean different layers."""
        numbers: dict[str, dict[int, set[int]]] = {}
        held = self.tensors(Kind.PARAM, self.steps[0]) if self.steps else {}
        for name, pieces in held.items():
            match = LAYER.match(name)
            if match is not None:
                stages = numbers.setdefault(match[1], {})
                for piece in pieces:
                    found = stages.setdefault(self.coordinate(piece.rank, "pp"), set())
                    found.add(int(match[2]))
        own = tuple(
            prefix
            for prefix, stages in numbers.items()
            if len(stages) > 1
            and all(found == set(range(len(found))) for found in stages.values())
            and self._stages_differ(pieces for n, pieces in held.items() if n.startswith(prefix))
        )
        for moment, by_name in self._groups.items() if own else ():
            renamed: dict[str, list[Held]] = {}
            for name, pieces in by_name.items():
                for piece in pieces:
                    stage = self.coordinate(piece.rank, "pp")
                    told = f"{name}{OF_STAGE}{stage})" if name.startswith(own) else name
                    renamed.setdefault(told, []).append(piece)
            self._groups[moment] = renamed

    def _stages_differ(self, tensors: Iterable[Sequence[Held]]) -> bool:
        """Whether tensors of the same name begin with other values on other stages."""
        for pieces in tensors:
            values: dict[Hashable, dict[int, Hashable]] = {}
            for piece in pieces:
                if piece.entry.file is not None:
                    at = values.setdefault(piece.place, {})
                    at[self.coordinate(piece.rank, "pp")] = self.fingerprint(piece).digest
            if any(len(set(found.values())) > 1 for found in values.values()):
                return True
        return False

    def _differing_axes(self, said: Mapping[int, Hashable], prefer: Sequence[str]) -> Iterable[str]:
        seen: set[frozenset[frozenset[int]]] = set()
        for axis in sorted(self.axes, key=lambda axis: axis not in prefer):
            groups = frozenset(frozenset(self.group(rank, axis)) for rank in said)
            if groups in seen:
                continue
            seen.add(groups)
            if any(len({said[rank] for rank in group if rank in said}) > 1 for group in groups):
                yield axis


def _own_axes(reader: TraceReader) -> dict[str, int]:
    """Return the axes of more than one rank, without those that are folds of others."""
    axes: dict[str, int] = {}
    for index in reader.ranks:
        groups = {axis: set(ranks) for axis, ranks in index.axes.items() if len(ranks) > 1}
        for axis, ranks in groups.items():
            parts = math.prod(len(other) for other in groups.values() if other < ranks)
            if parts != len(ranks):
                axes.setdefault(axis, len(ranks))
    return axes
