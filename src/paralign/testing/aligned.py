"""``assert_aligned``: fail a test when two runs are not the same training run, and say why."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paralign.align.compare import compare
from paralign.align.report.case import explain
from paralign.align.verdict import ALIGNED, Report
from paralign.errors import AlignError, ConfigError
from paralign.testing.comparisons import Comparison, tell
from paralign.testing.live import Side, is_module, is_trace, record_module, write_gradients

_FINDINGS = 5


def assert_aligned(
    reference: Side,
    parallel: Side,
    *,
    mesh: Any = None,
    names: Any = None,
    shards: Any = None,
    truth: Side | None = None,
    allow_skipped: bool = False,
    folder: str | Path | None = None,
) -> Report:
    """Pass if ``parallel`` is the same training run as ``reference``; fail with the verdict if not.

    Both are traces that ``pa.record`` wrote; or ``parallel`` is a live module right after backward
    (DTensors, FSDP, DDP and pipeline chunks included), and ``reference`` a module on one device
    after its backward, or its gradients by global name. Inside of a process group every rank calls
    it, and every rank passes or fails; the reference of rank 0 counts.

    Args:
        reference: The run to be equal to.
        parallel: The run under test.
        mesh: The mesh of a live ``parallel``, as for ``pa.record``.
        names: Other names of parameters -> those of the reference, as for ``pa.record``.
        shards: What plain tensors of a live ``parallel`` are cut over, as for ``pa.record``.
        truth: The reference in float64: then a run in float32 or bfloat16 may be no further from
            it than a small multiple of what the reference is.
        allow_skipped: Let what could not be compared not fail the test.
        folder: Where to record live modules; every rank has to see it. None: a temporary folder
            of this machine.

    Returns:
        The report, if they are aligned.

    Comm:
        For live modules in a process group: broadcasts and barriers over the default group.

    Raises:
        AlignError: They are not aligned, or it could not be told.
        ConfigError: A side is none of the above, or a trace is damaged.
    """
    if is_trace(parallel):
        sides = {"reference": reference, "parallel": parallel}
        sides |= {} if truth is None else {"truth": truth}
        with tempfile.TemporaryDirectory(prefix="paralign-") as spare:
            traces = {role: _trace(side, Path(spare) / role) for role, side in sides.items()}
            report = _compare(traces, names=names, allow_skipped=allow_skipped)
            kept = _tell(report, traces)
        return _pass_or_fail(report, kept)
    if not is_module(parallel):
        raise ConfigError(
            f"parallel={type(parallel).__name__} is neither a trace folder nor a module with "
            "gradients. Give pa.record's folder, or the module right after backward()."
        )
    with _shared_folder(folder) as shared:
        return _assert_live(
            reference,
            parallel,
            truth,
            shared,
            allow_skipped=allow_skipped,
            recording={"mesh": mesh, "names": names, "shards": shards},
        )


def _assert_live(
    reference: Side,
    parallel: Side,
    truth: Side | None,
    folder: Path,
    *,
    allow_skipped: bool,
    recording: Mapping[str, Any],
) -> Report:
    """Record on every rank, compare on rank 0, and have every rank end in the same way."""
    weights = is_module(reference) and (truth is None or is_module(truth))
    traces = {"parallel": folder / "parallel"}
    record_module(traces["parallel"], parallel, weights=weights, **recording)
    outcome: list[Any] = [None, None, None]
    _barrier()
    if _rank() == 0:
        try:
            traces["reference"] = _trace(reference, folder / "reference", weights=weights)
            if truth is not None:
                traces["truth"] = _trace(truth, folder / "truth", weights=weights)
            report = _compare(traces, names=None, allow_skipped=allow_skipped)
            outcome = [report, _tell(report, traces), None]
        except ConfigError as refused:
            outcome[2] = refused
    if _world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    report, kept, trouble = outcome
    if trouble is not None:
        raise trouble
    return _pass_or_fail(report, kept)


def _trace(side: Side, folder: Path, *, weights: bool = True) -> Path:
    """Return the trace of a side that is on one device, or a trace already."""
    if isinstance(side, str | Path):
        return Path(side)
    if is_module(side):
        record_module(folder, side, weights=weights, alone=True)
    elif isinstance(side, Mapping):
        write_gradients(folder, side)
    else:
        raise ConfigError(
            f"reference={type(side).__name__} is neither a trace folder, a module with gradients, "
            "nor a mapping from global names to gradients."
        )
    return folder


def _compare(traces: Mapping[str, Path], *, names: Any, allow_skipped: bool) -> Report:
    return compare(
        traces["reference"],
        traces["parallel"],
        truth=traces.get("truth"),
        names=names,
        allow_skipped=allow_skipped,
    )


def _tell(report: Report, traces: Mapping[str, Path]) -> Path | None:
    findings = [finding.to_dict() for finding in report.findings]
    comparison = Comparison(dict(report.mesh), report.verdict, findings)
    return tell(comparison, traces, report.to_json())


def _pass_or_fail(report: Report, kept: Path | None) -> Report:
    if report.verdict == ALIGNED:
        return report
    raise AlignError(describe(report, kept))


def describe(report: Report, kept: Path | None = None) -> str:
    """Return the message of a failing comparison: the verdict, then every finding with its fix."""
    lines = [f"{report.verdict}: {report.why}"]
    for number, finding in enumerate(report.findings[:_FINDINGS], start=1):
        text = explain(finding).replace("\n", "\n     ")
        lines.append(f"  {number}. {text}")
    if len(report.findings) > _FINDINGS:
        lines.append(f"  ... and {len(report.findings) - _FINDINGS} more findings")
    if report.coverage.skipped:
        first = report.coverage.skipped[0]
        lines.append(
            f"  not compared: {len(report.coverage.skipped)}, first {first['name']}: {first['why']}"
        )
    if kept is not None:
        lines.append(f"  traces kept in {kept}")
    return "\n".join(lines)


@contextmanager
def _shared_folder(given: str | Path | None) -> Iterator[Path]:
    """Yield a folder that every rank knows; a temporary one is removed by rank 0."""
    if given is not None:
        yield Path(given)
        return
    chosen = [tempfile.mkdtemp(prefix="paralign-") if _rank() == 0 else None]
    if _world_size() > 1:
        dist.broadcast_object_list(chosen, src=0)
    folder = Path(str(chosen[0]))
    try:
        yield folder
    finally:
        if _rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _barrier() -> None:
    if _world_size() > 1:
        dist.barrier()
