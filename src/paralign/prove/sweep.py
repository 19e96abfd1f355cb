"""``paralign sweep``: judges every legal mesh and schedule of a number of ranks, as a matrix.

The reference does not depend on the mesh, so it is recorded once; all cells run in one world.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paralign.config.run import RunConfig
from paralign.errors import ConfigError, ParalignError
from paralign.launch import start_fork_server
from paralign.prove.one_world import RunDone, run_many
from paralign.prove.run import Say, check_plan, dtype_of, judge_run, local_folder, record_references
from paralign.prove.sweep_cells import Cell, cells_of, pairs_cover
from paralign.requirements import require_torch

SCHEMA = 1
REFUSED, FAILED, NOT_RUN = "refused", "failed", "not run"


@dataclass(kw_only=True)
class CellResult:
    """The verdict of one cell: that of its report, ``refused``, ``failed`` or ``not run``."""

    mesh: dict[str, int]
    schedule: str
    name: str
    verdict: str
    worst_eps: float | None = None
    seconds: float | None = None
    why: str = ""
    fix: str = ""
    """What was found in it, with the fixes."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as the report stores it."""
        return dict(vars(self))


@dataclass(kw_only=True)
class SweepReport:
    """A matrix of verdicts."""

    config: Any
    world_size: int
    dtype: str
    subset: str
    cells: list[CellResult] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def summary(self) -> dict[str, int]:
        """How many cells have which verdict."""
        counts: dict[str, int] = {"cells": len(self.cells)}
        for cell in self.cells:
            counts[cell.verdict] = counts.get(cell.verdict, 0) + 1
        return counts

    @property
    def exit_status(self) -> int:
        """0: all that ran are aligned; 1, 3, 4: one is misaligned, failed, inconclusive."""
        verdicts = {cell.verdict for cell in self.cells}
        for verdict, status in (("misaligned", 1), (FAILED, 3), ("inconclusive", 4)):
            if verdict in verdicts:
                return status
        return 0 if "aligned" in verdicts else 4

    def to_json(self) -> str:
        """Return the report as a JSON text, which a later sweep can go on from."""
        content = {
            "schema": SCHEMA,
            "config": self.config,
            "world_size": self.world_size,
            "dtype": self.dtype,
            "subset": self.subset,
            "sweep": {
                "cells": [cell.to_dict() for cell in self.cells],
                "summary": self.summary,
            },
            "timings": {"total_s": self.seconds},
        }
        return json.dumps(content, indent=1, allow_nan=False)


def sweep(
    config: RunConfig,
    world_size: int,
    *,
    subset: str = "full",
    budget: float | None = None,
    earlier: Sequence[CellResult] = (),
    keep: Callable[[SweepReport], object] | None = None,
    timeout: float = 300.0,
    progress: Say | None = None,
) -> SweepReport:
    """Judge every legal mesh and schedule of ``world_size`` ranks.

    Args:
        config: The run; its mesh and schedule are replaced.
        world_size: Number of ranks of every cell.
        subset: ``full``, or ``pairs``: few cells in which every pair of settings occurs.
        budget: Seconds after which no further cell is begun.
        earlier: Results that are taken as they are.
        keep: Told of the report so far after every cell.
        timeout: Seconds without progress after which a run counts as hung.
        progress: Told what is going on.

    Raises:
        ConfigError: No cell can run; each one's reason is in the message.
    """
    began = time.perf_counter()
    say = progress or (lambda text: None)
    start_fork_server("paralign.prove.sweep_ranks", "paralign.prove.reference")
    require_torch(feature="paralign sweep")
    cells = _checked(cells_of(config, world_size), config)
    runnable = [cell for cell in cells if cell.config is not None]
    if not runnable:
        reasons = [f"{cell.name}: {cell.why}" for cell in cells]
        raise ConfigError.from_problems(
            f"no mesh and schedule of {world_size} ranks can run this config",
            reasons or [f"world={world_size} is no multiple of tp={config.mesh.tp}"],
        )
    chosen = pairs_cover(cells) if subset == "pairs" else runnable
    known = {result.name: result for result in earlier if result.verdict not in (NOT_RUN, FAILED)}
    report = SweepReport(
        config=config.model_dump(mode="json"),
        world_size=world_size,
        dtype=dtype_of(config),
        subset=subset,
        cells=[known.get(cell.name) or _waiting(cell) for cell in cells if _shown(cell, chosen)],
    )
    todo = [cell for cell in chosen if cell.name not in known]
    if todo:
        with local_folder(None) as folder:
            _Sweep(config, report, folder, timeout, say, keep, began, budget).run(todo)
    report.seconds = time.perf_counter() - began
    return report


def _shown(cell: Cell, chosen: Sequence[Cell]) -> bool:
    return cell.config is None or any(cell.name == other.name for other in chosen)


def _waiting(cell: Cell) -> CellResult:
    refused = cell.config is None
    return CellResult(
        mesh=dict(cell.mesh),
        schedule=cell.schedule,
        name=cell.name,
        verdict=REFUSED if refused else NOT_RUN,
        why=cell.why if refused else "the time budget was used up before it began",
    )


def _checked(cells: Sequence[Cell], config: RunConfig) -> list[Cell]:
    """Refuse also what cannot run in the dtype that is compared."""
    dtype, result = dtype_of(config), []
    for cell in cells:
        if cell.config is not None:
            try:
                check_plan(cell.config, dtype)
            except ConfigError as error:
                cell = Cell(mesh=cell.mesh, schedule=cell.schedule, why=str(error))
        result.append(cell)
    return result


class _Sweep:
    def __init__(
        self,
        config: RunConfig,
        report: SweepReport,
        folder: Path,
        timeout: float,
        say: Say,
        keep: Callable[[SweepReport], object] | None,
        began: float,
        budget: float | None,
    ) -> None:
        self._config = config
        self._report = report
        self._folder = folder
        self._timeout = timeout
        self._say = say
        self._keep = keep
        self._began = began
        self._budget = budget
        self._results = {cell.name: cell for cell in report.cells}

    def run(self, cells: Sequence[Cell]) -> None:
        from paralign.prove.sweep_ranks import run_cells
        from paralign.train.build import numerics

        # How many rows go through the reference at once is that of the first cell.
        first = cells[0].config
        assert first is not None
        record_references(first, self._report.dtype, self._folder, self._timeout, self._say)
        self._say(f"{len(cells)} meshes and schedules of {self._report.world_size} ranks")
        run_many(
            run_cells,
            [cell.name for cell in cells],
            self._report.world_size,
            {cell.name: cell.config for cell in cells},
            numerics(self._report.dtype, self._config),
            self._folder,
            device=self._config.device,
            timeout=self._timeout,
            describe="rank {}".format,
            on_done=self._done,
            on_failed=self._failed,
        )

    def _done(self, run: RunDone) -> bool:
        """Judge one cell; whether there is time for more."""
        from paralign.align.report.case import explain
        from paralign.prove.routing import routing_folder

        trace = self._folder / run.name
        judged = judge_run(self._folder, trace)
        shutil.rmtree(trace)
        shutil.rmtree(routing_folder(trace), ignore_errors=True)
        result = self._results[run.name]
        result.verdict, result.seconds = judged.verdict, run.seconds
        result.worst_eps = None if judged.worst is None else judged.worst.eps
        result.why = "" if judged.verdict == "aligned" else judged.why
        result.fix = "\n\n".join(explain(finding) for finding in judged.findings)
        self._say_so(result)
        over = self._budget is not None and time.perf_counter() - self._began > self._budget
        return not over

    def _failed(self, name: str, error: ParalignError) -> None:
        result = self._results[name]
        result.verdict, result.why = FAILED, str(error)
        shutil.rmtree(self._folder / name, ignore_errors=True)
        self._say_so(result)

    def _say_so(self, result: CellResult) -> None:
        done = sum(cell.verdict not in (NOT_RUN, REFUSED) for cell in self._report.cells)
        self._say(f"{done} done, {result.name}: {result.verdict}")
        self._report.seconds = time.perf_counter() - self._began
        if self._keep is not None:
            self._keep(self._report)


def read_results(text: str, config: RunConfig, world_size: int) -> list[CellResult]:
    """Return the cells of an earlier sweep of the same config.

    Raises:
        ConfigError: The text is no such result, or of another config or number of ranks.
    """
    try:
        content = json.loads(text)
        cells = [CellResult(**cell) for cell in content["sweep"]["cells"]]
        told = content["config"], content["world_size"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"this is no result of a sweep ({type(error).__name__}: {error}). Remove the file, or "
            "leave --resume out."
        ) from None
    if told != (json.loads(config.model_dump_json()), world_size):
        raise ConfigError(
            "this is the result of a sweep of another config or number of ranks. Leave --resume "
            "out to begin anew, or give another --json."
        )
    return cells
