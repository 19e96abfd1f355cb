"""``paralign drill``: breaks a run in every known way, and sees whether the verdict says so.

The reference is recorded once. All faulty runs of a config share one world of ranks; a fault that
ends the world counts as caught by that error, and a fresh world goes on with the next.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from paralign import __version__
from paralign.config.run import RunConfig
from paralign.errors import ConfigError, ParalignError
from paralign.launch import start_fork_server
from paralign.prove.drill_report import DrillReport, FaultOutcome
from paralign.prove.fault import Fault, only_fitting
from paralign.prove.one_world import RunDone, run_many
from paralign.prove.run import Say, check_plan, dtype_of, judge_run, local_folder, record_references
from paralign.prove.separate import describe_change, separate
from paralign.requirements import require_torch

CLEAN = "clean"
_CONFIG = "drill-config.json"
_MOST_JUDGES = 4


def drill(
    config: RunConfig,
    *,
    faults: str | Path | None = None,
    only: Sequence[str] = (),
    trace: str | Path | None = None,
    timeout: float = 300.0,
    progress: Say | None = None,
) -> DrillReport:
    """Inject every fault that fits ``config``, one run each, and judge what is found.

    Args:
        config: The run.
        faults: A file with faults of the user's own (``@pa.fault``), tried besides paralign's.
        only: Names or beginnings of names of the faults to try; empty: all.
        trace: Folder to keep all traces in; None: each is deleted once it is judged. Runs that
            were recorded there by a drill of the same config are judged again, not made again.
        timeout: Seconds without progress after which a run counts as hung.
        progress: Told what is going on.

    Raises:
        ConfigError: No fault fits, or ``only`` names none.
        ScheduleError: The plan is refused in the dtype that is compared.
        RankError: The run without a fault fails.
    """
    say = progress or (lambda text: None)
    start_fork_server("paralign.prove.drill_ranks", "paralign.prove.reference")
    require_torch(feature="paralign drill")
    from paralign.prove.fault_list import all_faults

    dtype = dtype_of(config)
    check_plan(config, dtype)
    fitting, skipped = only_fitting(_chosen(all_faults(faults), only), config)
    if not fitting:
        lacks = sorted({lack for _, what in skipped for lack in what})
        raise ConfigError(
            f"none of {len(skipped)} faults fits this config, which lacks {', '.join(lacks)}. Give "
            "an axis more than one rank, or faults of your own with --faults."
        )
    began = time.perf_counter()
    with local_folder(trace) as folder:
        runs = _Drill(config, dtype, folder, faults, timeout, say, keep=trace is not None)
        clean, outcomes = runs.run(fitting)
    return DrillReport(
        config=config.model_dump(mode="json"),
        mesh=config.mesh.model_dump(mode="json"),
        dtype=dtype,
        clean=clean,
        outcomes=outcomes,
        skipped=[(fault.name, lacks) for fault, lacks in skipped],
        seconds=time.perf_counter() - began,
    )


def _chosen(faults: Sequence[Fault], only: Sequence[str]) -> list[Fault]:
    chosen = [f for f in faults if not only or any(f.name.startswith(name) for name in only)]
    unmatched = [name for name in only if not any(f.name.startswith(name) for f in faults)]
    if unmatched:
        raise ConfigError(
            f"--only={unmatched[0]!r} is no fault and no beginning of one. `paralign drill --list` "
            "names all."
        )
    return chosen


class _Drill:
    def __init__(
        self,
        config: RunConfig,
        dtype: str,
        folder: Path,
        file: str | Path | None,
        timeout: float,
        say: Say,
        *,
        keep: bool,
    ) -> None:
        from paralign.train.build import numerics

        self._config = config
        self._dtype = dtype
        self._precision = numerics(dtype, config)
        self._folder = folder
        self._file = None if file is None else Path(file).absolute()
        self._timeout = timeout
        self._say = say
        self._keep = keep

    def run(self, faults: Sequence[Fault]) -> tuple[Any, list[FaultOutcome]]:
        """Record the reference, the clean run and every fault; judge each as it is done."""
        if not self._is_known():
            for name in [CLEAN, *(fault.name for fault in faults)]:
                shutil.rmtree(self._folder / name, ignore_errors=True)
            record_references(self._config, self._dtype, self._folder, self._timeout, self._say)
            if self._keep:
                told = self._folder / f".{_CONFIG}"
                told.write_text(self._described, encoding="utf-8")
                told.replace(self._folder / _CONFIG)
        with _judges() as judge:
            done = self._one_step(faults, judge) if self._config.align.steps > 1 else {}
            left = [fault.name for fault in faults if fault.name not in done]
            done |= self._record([CLEAN, *left], judge)
            clean, _ = done.pop(CLEAN).result()
            outcomes = [self._outcome(fault, done[fault.name]) for fault in faults]
        return clean, outcomes

    def _one_step(self, faults: Sequence[Fault], judge: ProcessPoolExecutor) -> dict[str, Any]:
        """Return the faults that show in the first step: later ones would say nothing new."""
        names = [fault.name for fault in faults if "steps" not in fault.needs]
        if not names:
            return {}
        align = self._config.align.model_copy(update={"steps": 1})
        short = _Drill(
            self._config.model_copy(update={"align": align}),
            self._dtype,
            self._folder,
            self._file,
            self._timeout,
            self._say,
            keep=self._keep,
        )
        found = short._record(names, judge)
        shown = {
            name: result
            for name, result in found.items()
            if not isinstance(result, Future) or result.result()[0].findings
        }
        for name in found.keys() - shown.keys():
            if not self._is_recorded(name):  # all steps of it may be there from an earlier drill
                shutil.rmtree(self._folder / name, ignore_errors=True)
        return shown

    def _outcome(self, fault: Fault, found: Any) -> FaultOutcome:
        if not isinstance(found, Future):
            return FaultOutcome(fault=fault, error=found)
        report, inert = found.result()
        if inert:
            return FaultOutcome(fault=fault, report=report, inert=True)
        report, told = separate(self._config, report, lambda changed: self._again(fault, changed))
        return FaultOutcome(fault=fault, report=report, separated_by=told)

    def _again(self, fault: Fault, changed: RunConfig) -> Any:
        """Run one fault on another config, to separate candidates, and judge it.

        Raises:
            ConfigError: The fault has no place there, so the run would say nothing.
        """
        if lacks := fault.lacks(changed):
            raise ConfigError(f"{fault.name} has no place there: it lacks {', '.join(lacks)}")
        self._say(f"{fault.name}: once more with {describe_change(self._config, changed)}")
        with local_folder(None) as folder:
            record_references(changed, self._dtype, folder, self._timeout, self._say)
            again = _Drill(
                changed, self._dtype, folder, self._file, self._timeout, self._say, keep=True
            )
            with _judges() as judge:
                found = again._record([fault.name], judge)[fault.name]
                if isinstance(found, ParalignError):
                    raise found
                return found.result()[0]

    def _record(self, names: list[str], judge: ProcessPoolExecutor) -> dict[str, Any]:
        """Run all names; return the future verdict, or the error that ended the run."""
        from paralign.prove.drill_ranks import run_faults

        done: dict[str, Any] = {}
        total = len(names)

        def finished(run: RunDone) -> bool:
            done[run.name] = judge.submit(_judge, self._folder, run.name, keep=self._keep)
            self._say(f"{len(done)} of {total} runs, {run.name}")
            return True

        def failed(name: str, error: ParalignError) -> None:
            if name == CLEAN:
                raise error
            done[name] = error
            shutil.rmtree(self._folder / name, ignore_errors=True)

        known = [name for name in names if self._is_recorded(name)]
        for name in known:
            finished(RunDone(name))
        names = [name for name in names if name not in known]
        if not names:
            return done
        degrees = self._config.mesh.degrees
        self._say(f"{len(names)} runs on {degrees.world_size} ranks, {degrees}")
        run_many(
            run_faults,
            names,
            degrees.world_size,
            self._config,
            self._precision,
            self._file,
            self._folder,
            device=self._config.device,
            timeout=self._timeout,
            describe=degrees.describe_rank,
            on_done=finished,
            on_failed=failed,
        )
        return done

    @property
    def _described(self) -> str:
        own = None if self._file is None else self._file.read_text(encoding="utf-8")
        described = {
            "version": __version__,
            "config": self._config.model_dump(mode="json"),
            "faults": own,
        }
        return json.dumps(described, indent=1)

    def _is_known(self) -> bool:
        """Whether the folder holds the references of this very config."""
        told = self._folder / _CONFIG
        return told.exists() and told.read_text(encoding="utf-8") == self._described

    def _is_recorded(self, name: str) -> bool:
        """Whether an earlier drill into this folder recorded enough steps of a run."""
        facts = self._folder / name / "facts.json"  # written last
        if not facts.exists():
            return False
        return len(json.loads(facts.read_text())["steps"]) >= self._config.align.steps


def _judge(folder: Path, name: str, *, keep: bool) -> tuple[Any, bool]:
    """Return the report of a run, and whether it is the clean run to the last bit."""
    import torch

    from paralign.prove.same_trace import same_numbers

    torch.set_num_threads(1)  # several of these run beside the ranks
    run, clean = folder / name, folder / CLEAN
    report = judge_run(folder, run)
    same = name != CLEAN and not report.findings and clean.exists() and same_numbers(clean, run)
    if not keep and name != CLEAN:
        shutil.rmtree(run)
    return report, same


def _judges() -> ProcessPoolExecutor:
    """Return processes that compare runs while the ranks are at the next."""
    count = max(1, min(_MOST_JUDGES, os.cpu_count() or 1))
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("forkserver"))
