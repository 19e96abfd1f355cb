"""Which meshes and schedules a sweep tries: pure, so the table is known before a rank starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from paralign.config.model_choice import choose_model
from paralign.config.rules import find_problems, plan_of
from paralign.config.run import RunConfig
from paralign.mesh import CARVED, divisors
from paralign.parallel.stages import SCHEDULES
from paralign.parallel.support import problems as plan_problems

# Outermost first. ep is carved out of the last three, where the model has experts.
SWEPT_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One mesh and schedule.

    Attributes:
        mesh: Axis -> degree.
        schedule: Name of the schedule.
        config: The config with both; None: it is refused.
        why: Why it is refused; empty: it is not.
    """

    mesh: tuple[tuple[str, int], ...]
    schedule: str
    config: RunConfig | None = None
    why: str = ""

    @property
    def name(self) -> str:
        """Such as ``pp2-dp_shard2-1F1B``: what a results file calls it."""
        parts = [f"{axis}{degree}" for axis, degree in self.mesh if degree > 1]
        return "-".join([*parts, self.schedule])


def cells_of(config: RunConfig, world_size: int) -> list[Cell]:
    """Return every factorisation of ``world_size`` times every schedule, the refused ones too.

    Without a pipeline (pp=1) only the config's own schedule is tried: then they all are the same
    order of calls. A user's program gets the config's schedule, whatever it does with it. A user's
    own model and program keep the config's tp and ep: only they know whether they have a plan for
    it. A model without experts has no ep.
    """
    own = find_schedule_name(config)
    is_own = config.program is not None or config.model.name is None
    fixed = config.mesh.tp if is_own else 1
    axes = SWEPT_AXES[:-1] if is_own else SWEPT_AXES
    has_experts = not is_own and bool(choose_model(config.model).size("num_experts"))
    cells = []
    for outer in factorisations(world_size // fixed, axes) if world_size % fixed == 0 else ():
        carved = math.prod(outer[str(axis)] for axis in CARVED if str(axis) in outer)
        schedules = [own]
        if outer["pp"] > 1 and config.program is None:
            schedules = [kind.name for kind in SCHEDULES.values()]
        for ep in divisors(carved) if has_experts else [None]:
            mesh = outer if ep is None else {**outer, "ep": ep}
            cells += [_cell(config, mesh, schedule) for schedule in schedules]
    return cells


def find_schedule_name(config: RunConfig) -> str:
    """Return the config's schedule as it is spelt in the table."""
    kind = SCHEDULES.get(config.pipeline.schedule.lower())
    return kind.name if kind else config.pipeline.schedule


def factorisations(number: int, axes: Sequence[str] = SWEPT_AXES) -> Iterator[dict[str, int]]:
    """Yield every way to write ``number`` as a product of the degrees of ``axes``."""

    def split(rest: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        if len(axes) == 1:
            yield {axes[0]: rest}
            return
        for degree in divisors(rest):
            for others in split(rest // degree, axes[1:]):
                yield {axes[0]: degree, **others}

    yield from split(number, axes)


def pairs_cover(cells: Sequence[Cell]) -> list[Cell]:
    """Choose few of the runnable cells in which every pair of settings of two axes occurs.

    Greedy: the cell with the most pairs that have not occurred yet comes next, the earliest of
    several. A schedule counts as the setting of an axis.
    """
    runnable = [cell for cell in cells if cell.config is not None]
    missing = set().union(*(_pairs(cell) for cell in runnable)) if runnable else set()
    chosen = []
    while missing:
        best = max(runnable, key=lambda cell: len(_pairs(cell) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return [cell for cell in cells if cell in chosen]


def _pairs(cell: Cell) -> set[Any]:
    return set(combinations([*cell.mesh, ("schedule", cell.schedule)], 2))


def _cell(config: RunConfig, mesh: dict[str, int], schedule: str) -> Cell:
    """Set mesh and schedule, leave open what only fitted the config's own, and ask every rule."""
    kind = SCHEDULES.get(schedule.lower())
    pipeline = config.pipeline.model_copy(update={"schedule": schedule})
    if kind is not None and kind.name != find_schedule_name(config):
        # Chosen for another schedule; null lets each have its own number.
        pipeline = pipeline.model_copy(update={"stages_per_rank": None})
    if mesh["pp"] != config.mesh.pp:
        pipeline = pipeline.model_copy(update={"layers_per_stage": None})
    changed = config.model_copy(
        update={"mesh": config.mesh.model_copy(update=mesh), "pipeline": pipeline}
    )
    given = tuple(mesh.items())
    found = find_problems(changed)
    if not found and config.program is None:
        found = plan_problems(plan_of(changed))
    if found:
        return Cell(mesh=given, schedule=schedule, why=found[0])
    return Cell(mesh=given, schedule=schedule, config=changed)
