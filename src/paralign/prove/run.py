"""``paralign align``: makes the reference run and the parallel run, and has them judged."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paralign.config.rules import plan_of
from paralign.config.run import RunConfig
from paralign.errors import ConfigError, ScheduleError
from paralign.launch import World, current_world, join_world, run_ranks, start_fork_server
from paralign.parallel.support import problems
from paralign.prove.separate import describe_change, separate
from paralign.requirements import require_torch

Say = Callable[[str], None]


def align(
    config: RunConfig,
    *,
    trace: str | Path | None = None,
    timeout: float = 300.0,
    progress: Say | None = None,
) -> Any:
    """Run ``config`` on one device and in parallel, and compare the two, tensor by tensor.

    Starts local ranks, or uses the ranks that torchrun has started; then every rank calls it and
    gets the same verdict.

    Args:
        config: The run.
        trace: Folder to keep the traces in: ``reference``, ``parallel`` and, for dtypes below
            float64, ``truth``. None: they are deleted.
        timeout: Seconds without progress after which a run counts as hung.
        progress: Told what is going on.

    Returns:
        A :class:`paralign.align.Report`.

    Raises:
        ScheduleError: The plan is refused in the dtype that is compared.
        RankError: A rank raised, died or hung.
    """
    say = progress or (lambda text: None)
    world = current_world()
    if world is None:
        # It imports torch while this process does: on two cores that halves the wait.
        start_fork_server("paralign.prove.parallel", "paralign.prove.reference")
    require_torch(feature="paralign align")
    if world is not None:
        with join_world(config.device, timeout=timeout, describe=config.mesh.degrees.describe_rank):
            return _align_in_world(config, trace, world)
    with local_folder(trace) as folder:
        report = _align_locally(config, folder, timeout, say)
        if report.exit_status:

            def again(changed: RunConfig) -> Any:
                say(f"once more with {describe_change(config, changed)}")
                with local_folder(None) as other:
                    return _align_locally(changed, other, timeout, say)

            separate(config, report, again)
        return report


def dtype_of(config: RunConfig) -> str:
    """Return the dtype that is compared: float64 where the device has it."""
    if config.align.dtype is not None:
        return config.align.dtype
    from paralign.launch.device import has_float64

    return "float64" if has_float64(config.device) else "float32"


def check_plan(config: RunConfig, dtype: str) -> None:
    """Raise ``ScheduleError`` if the plan is refused in the dtype that is compared."""
    if config.program is not None:
        return  # the plan is the user's own
    reduce = "float32" if dtype == "bfloat16" else dtype
    plan = replace(plan_of(config), compute_dtype=dtype, reduce_dtype=reduce)
    if refused := problems(plan):
        raise ScheduleError.from_problems(f"the plan is refused in {dtype}", refused)


def _align_locally(config: RunConfig, folder: Path, timeout: float, say: Say) -> Any:
    from paralign.prove.parallel import run_parallel
    from paralign.train.build import numerics

    dtype = dtype_of(config)
    check_plan(config, dtype)
    degrees = config.mesh.degrees
    timings = record_references(config, dtype, folder, timeout, say)
    say(f"parallel run on {degrees.world_size} ranks, {degrees}")
    began = time.perf_counter()
    run_ranks(
        run_parallel,
        degrees.world_size,
        config,
        numerics(dtype, config),
        folder / "parallel",
        folder,
        device=config.device,
        timeout=timeout,
        describe=degrees.describe_rank,
        on_event=lambda rank, text: say(str(text)),
    )
    timings["parallel_s"] = time.perf_counter() - began
    say("comparing")
    return _judge(config, folder, timings)


def record_references(
    config: RunConfig, dtype: str, folder: Path, timeout: float, say: Say
) -> dict[str, float]:
    """Record the run on one device, and below float64 the truth, into folders of these names.

    Returns:
        Seconds by ``reference_s`` and ``truth_s``.

    Raises:
        RankError: A run failed.
    """
    from paralign.prove.reference import run_reference
    from paralign.train.build import numerics

    timings = {}
    for name, precision in reference_runs(dtype):
        say(f"{name} run on one device, {precision}")
        began = time.perf_counter()
        run_ranks(
            run_reference,
            1,
            config,
            numerics(precision, config),
            folder / name,
            _replayed(folder, name),
            timeout=timeout,
            describe=partial(_name_alone, folder / name),
            on_event=lambda rank, text: say(str(text)),
        )
        timings[f"{name}_s"] = time.perf_counter() - began
    return timings


def _align_in_world(config: RunConfig, trace: str | Path | None, world: World) -> Any:
    import torch.distributed as dist

    from paralign.prove.parallel import run_parallel
    from paralign.prove.reference import run_reference
    from paralign.train.build import numerics

    dtype = dtype_of(config)
    check_plan(config, dtype)
    timings: dict[str, float] = {}
    verdict: list[Any] = [None]
    with ExitStack() as stack:
        folder = _shared_folder(trace, world, stack)
        if world.rank == 0:
            for name, precision in reference_runs(dtype):
                began = time.perf_counter()
                run_reference(
                    config,
                    numerics(precision, config),
                    folder / name,
                    _replayed(folder, name),
                    alone=True,
                )
                timings[f"{name}_s"] = time.perf_counter() - began
        dist.barrier()
        began = time.perf_counter()
        run_parallel(config, numerics(dtype, config), folder / "parallel", folder)
        dist.barrier()
        timings["parallel_s"] = time.perf_counter() - began
        if world.rank == 0:
            verdict = [_judge(config, folder, timings)]
        dist.broadcast_object_list(verdict, src=0)
    return verdict[0]


def _judge(config: RunConfig, folder: Path, timings: dict[str, float]) -> Any:
    began = time.perf_counter()
    report = judge_run(folder, folder / "parallel")
    timings["compare_s"] = time.perf_counter() - began
    return replace(
        report,
        timings={**report.timings, **timings},
        config=config.model_dump(mode="json"),
        mesh=config.mesh.model_dump(mode="json"),
    )


def judge_run(folder: Path, trace: Path) -> Any:
    """Compare a run with the references in ``folder``, its router choices as well."""
    from paralign.align import compare
    from paralign.prove.routing_judge import judge_routing

    truth = folder / "truth"
    report = compare(folder / "reference", trace, truth=truth if truth.exists() else None)
    judge_routing(report, trace)
    return report


def reference_runs(dtype: str) -> list[tuple[str, str]]:
    """Return (trace name, dtype) of the runs on one device: below float64, the truth as well."""
    runs = [("reference", dtype)]
    return runs if dtype == "float64" else [*runs, ("truth", "float64")]


def _replayed(folder: Path, name: str) -> Path | None:
    """Return the trace whose router choices a run on one device is sent by; None: its own."""
    return folder / "reference" if name == "truth" else None


def _name_alone(trace: Path, rank: int) -> str:
    return f"{trace.name} run"


@contextmanager
def local_folder(trace: str | Path | None) -> Iterator[Path]:
    """Yield the folder to keep traces in, or one that is removed afterwards."""
    if trace is None:
        with tempfile.TemporaryDirectory(prefix="paralign-") as name:
            yield Path(name)
    else:
        Path(trace).mkdir(parents=True, exist_ok=True)
        yield Path(trace)


def _shared_folder(trace: str | Path | None, world: World, stack: ExitStack) -> Path:
    """Return a folder that every rank sees; rank 0 makes it."""
    import torch.distributed as dist

    chosen: list[str | None] = [None]
    if world.rank == 0:
        chosen = [str(stack.enter_context(local_folder(trace)).absolute())]
    dist.broadcast_object_list(chosen, src=0)
    folder = Path(str(chosen[0]))
    sees: list[bool] = [False] * world.world_size
    dist.all_gather_object(sees, folder.is_dir())
    if not all(sees):
        blind = [str(rank) for rank, seen in enumerate(sees) if not seen]
        raise ConfigError(
            f"trace={str(folder)!r} on rank 0 is not a folder that ranks {', '.join(blind)} can "
            "see. Give --trace a folder on a file system that all machines share."
        )
    return folder
