"""What an explanation may look at: both traces, everything that was measured, and the mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from paralign.align.budget import Budget
from paralign.align.judge import Compared
from paralign.align.pair import Moment, Side
from paralign.align.trace_reader import TraceReader
from paralign.align.verdict import Finding, TensorRow

NUM_MICROBATCHES = "num_microbatches"


@dataclass
class Context:
    """One comparison that failed, as the hypotheses see it.

    Args:
        reference: The run to be equal to.
        parallel: The run under test.
        compared: All tensors, judged.
        scalars: Losses, token counts and norms, judged.
        budget: The tolerances.
        steps: The steps that both sides recorded.
        facts: Findings about what the runs say of themselves; they come before any number.
    """

    reference: Side
    parallel: Side
    compared: Sequence[Compared]
    scalars: Sequence[tuple[Moment, TensorRow]]
    budget: Budget
    steps: Sequence[int]
    facts: Sequence[Finding] = ()
    recipes: list[Recipe] = field(default_factory=list)
    """How gradients were put together, as far as it was found out."""
    found: list[Finding] = field(default_factory=list)
    """Findings so far, in causal order; the first ones may be why later numbers are off."""

    @property
    def trace(self) -> TraceReader:
        """The trace under test."""
        return self.parallel.reader

    @cached_property
    def mesh(self) -> MeshAxes:
        """The mesh of the run under test."""
        return MeshAxes(self.trace)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """What a wrong factor could come from: axes and the number of micro-batches."""
        sizes = dict(self.mesh.sizes)
        number = self.trace.facts.run.get(NUM_MICROBATCHES)
        if isinstance(number, int):
            sizes[NUM_MICROBATCHES] = number
        return sizes

    @cached_property
    def owners(self) -> dict[str, Mapping[str, object]]:
        """Per parameter (and per module, under its own name) where it is defined."""
        owners: dict[str, Mapping[str, object]] = {}
        for index in self.trace.ranks:
            for name, owner in index.modules.items():
                owners[name] = owner
                owners.setdefault(str(owner.get("module")), owner)
        return owners

    @cached_property
    def tied(self) -> set[str]:
        """Names of parameters that have other names too: one parameter in several places."""
        ranks = (*self.trace.ranks, *self.reference.reader.ranks)  # stages may hold one name each
        return {e.name for index in ranks for e in index.tensors if e.aliases}

    @property
    def upstream(self) -> bool:
        """Whether something earlier is wrong already, so that later numbers may only follow."""
        return bool(self.found)

    def failing(self, kind: str, step: int) -> list[Compared]:
        """Return the tensors of a kind that are out of budget at a step, in causal order."""
        return [
            item
            for item in self.compared
            if item.moment.kind == kind and item.moment.step == step and not item.row.ok
        ]

    def judged(self, kind: str, step: int) -> list[Compared]:
        """Return all tensors of a kind at a step, in causal order."""
        return [
            item for item in self.compared if item.moment.kind == kind and item.moment.step == step
        ]

    def scalar(self, kind: str, step: int) -> TensorRow | None:
        """Return the row of a loss, token count or norm."""
        rows = [row for moment, row in self.scalars if (moment.kind, moment.step) == (kind, step)]
        return rows[0] if rows else None


@dataclass(frozen=True)
class Recipe:
    """How a tensor is put together: per contribution its weight."""

    labels: tuple[Label, ...]
    right: tuple[float, ...]
    """Weights that give the reference."""
    made: Mapping[int, tuple[float, ...]]
    """Per rank, the weights that give what it holds."""
    left: float
    """Relative error that both sets of weights leave on the whole tensor."""
    shared: frozenset[Label] = frozenset()
    """Contributions that are multiples of each other: only their weight together is known."""

    def of_its_own(self) -> Recipe:
        """Return the recipe without the contributions whose own weight is not known."""
        kept = [i for i, label in enumerate(self.labels) if label not in self.shared]
        return Recipe(
            tuple(self.labels[i] for i in kept),
            tuple(self.right[i] for i in kept),
            {rank: tuple(weights[i] for i in kept) for rank, weights in self.made.items()},
            self.left,
        )


class Label(NamedTuple):
    """Whose contribution it is."""

    rank: int
    micro_batch: int


class MeshAxes:
    """Axes of a run, as its ranks describe them.

    Axes that are products of others (``fsdp`` = ``dp_shard`` x ``cp``) are left out: they say
    nothing that their parts do not. A run that names no axis has one, called ``world``, so that
    replicas can still be told apart; :meth:`named` leaves it out again.

    Expert parallelism cuts the ranks of other axes once more, in its own way (``efsdp`` x ``ep``
    over ``dp_shard`` x ``cp`` x ``tp``). Such axes are no further coordinates, but others for the
    same ranks: a set of axes is of one grid or of the other, and so are those beside it.
    """

    def __init__(self, trace: TraceReader) -> None:
        axes: dict[str, set[int]] = {}
        for axis, ranks in trace.ranks[0].axes.items():
            # A folded axis whose other parts have one rank is the same axis again.
            if len(ranks) == 1 or set(ranks) not in axes.values():
                axes[axis] = set(ranks)
        self.sizes: dict[str, int] = {
            axis: len(ranks)
            for axis, ranks in axes.items()
            if len(ranks) == 1
            or math.prod(len(other) for other in axes.values() if other < ranks) != len(ranks)
        }
        self.all_sizes = {axis: len(ranks) for axis, ranks in trace.ranks[0].axes.items()}
        """Those that are products of others as well."""
        self._groups = {
            axis: {index.rank: tuple(index.axes.get(axis, [index.rank])) for index in trace.ranks}
            for axis in self.sizes
        }
        self.is_named = bool(axes) or trace.world_size == 1
        if not self.is_named:
            everyone = tuple(range(trace.world_size))
            self.sizes["world"] = trace.world_size
            self._groups["world"] = dict.fromkeys(everyone, everyone)
        self.world_size = trace.world_size
        self._grids = self._find_grids()

    def _find_grids(self) -> list[tuple[str, ...]]:
        """Return sets of axes that number all ranks; what the first lacks is in the second."""
        base: list[str] = []
        for axis, size in self.sizes.items():
            if size > 1 and not set(self._groups[axis][0]) <= set(self.peers(0, base)):
                base.append(axis)
        again = [axis for axis, size in self.sizes.items() if size > 1 and axis not in base]
        if not again:
            return [tuple(base)]
        reached = set(self.peers(0, again))
        beside = [axis for axis in base if not set(self._groups[axis][0]) <= reached]
        return [tuple(base), (*beside, *again)]

    @property
    def live(self) -> list[str]:
        """Axes with more than one rank, of the first grid."""
        return list(self._grids[0])

    def others(self, axes: Sequence[str]) -> list[str]:
        """Return the axes beside ``axes`` in the grid that they are of."""
        grid = next((grid for grid in self._grids if {*axes} <= {*grid}), self._grids[0])
        return [axis for axis in grid if axis not in axes]

    def named(self, axes: Sequence[str]) -> list[str]:
        """Return the axes that the run itself names."""
        return list(axes) if self.is_named else []

    def subsets(self) -> list[tuple[str, ...]]:
        """Return every set of live axes of a grid, small ones and the first grid's first."""
        largest = max(map(len, self._grids))
        sets = (
            chosen
            for number in range(1, largest + 1)
            for grid in self._grids
            for chosen in combinations(grid, number)
        )
        return list(dict.fromkeys(sets))

    def peers(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along ``axes``, itself included."""
        reached, queue = {rank}, [rank]
        while queue:
            at = queue.pop()
            new = {peer for axis in axes for peer in self._groups[axis][at]} - reached
            reached |= new
            queue += new
        return tuple(sorted(reached))

    def degree(self, axes: Sequence[str]) -> int:
        """Return how many ranks a group over ``axes`` has."""
        return math.prod(self.sizes[axis] for axis in axes)

    def coordinates_that_tell(
        self, some: Sequence[int], everyone: Sequence[int]
    ) -> tuple[str, ...]:
        """Return the smallest set of axes whose coordinates tell ``some`` from ``everyone``.

        Empty if there is nothing to tell: all of them, or none.
        """
        chosen, rest = set(some), set(everyone) - set(some)
        if not chosen or not rest:
            return ()
        for axes in self.subsets():
            others = self.others(axes)
            if not any(set(self.peers(rank, others)) & rest for rank in chosen):
                return axes
        return tuple(self.live)

    def axes_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the smallest set of axes along which ``ranks`` differ from each other."""
        if len(ranks) < 2:
            return ()
        for axes in self.subsets():
            if set(ranks) <= set(self.peers(ranks[0], axes)):
                return axes
        return tuple(self.live)
