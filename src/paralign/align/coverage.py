"""Say what a comparison covered: tensors, how each was paired, and what it did not exercise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paralign.align.judge import Judge
from paralign.align.places import Pairing
from paralign.align.trace_reader import TraceReader
from paralign.align.verdict import Coverage

_LOW_PRECISION = ("float32", "bfloat16", "float16")


def coverage_of(
    reference: TraceReader,
    parallel: TraceReader,
    judge: Judge,
    pairing: Pairing,
    steps: Sequence[int],
    others: Iterable[dict[str, str]],
) -> Coverage:
    """Count what was compared and list what was not.

    Args:
        reference: The run to be equal to.
        parallel: The run under test.
        judge: What was measured of tensors.
        pairing: How the run's tensors were found.
        steps: The steps that were compared.
        others: What else was not compared: ``name`` and ``why``.
    """
    skipped = [*others, *judge.skipped]
    for side, trace in (("reference", reference), ("parallel run", parallel)):
        skipped += [
            {"name": f"step {step}", "why": f"recorded only in the {side}"}
            for step in trace.facts.steps
            if step not in steps
        ]
        skipped += [
            {"name": item["name"], "why": f"not recorded by rank {index.rank}: {item['why']}"}
            for index in trace.ranks
            for item in index.not_recorded
        ]
    skipped += [
        {"name": name, "why": why}
        for name, why in pairing.unpaired.items()
        if name not in judge.names
    ]
    left_out = {item["name"] for item in judge.skipped}
    seen = {item.row.name for item in judge.compared} | judge.without_gradient
    compared = seen - left_out
    coverage = Coverage(
        parameters=len(judge.names),
        compared=len(compared),
        elements=sum(judge.names[name] for name in compared),
        skipped=list({tuple(item.items()): item for item in skipped}.values()),
        paths=unexercised_paths(reference, parallel),
    )
    for name in compared:
        coverage.paired[judge.paired_by(name)] += 1
    return coverage


def unexercised_paths(reference: TraceReader, parallel: TraceReader) -> list[str]:
    """Name code that the run will use and this comparison did not.

    What a run says with ``facts={"train_dtype": ..., "paths": [...]}`` is what it trains with: its
    dtype, and the names of kernels and compiled parts (``flash_attention``, ``compile``).
    """
    said = {**reference.facts.run, **parallel.facts.run}
    paths = []
    compute, train = str(said.get("compute_dtype")), said.get("train_dtype")
    if train is not None and train != compute:
        paths.append(
            f"{train} kernels (attention, grouped matmul, fused ones): compared in {compute}. "
            f"Compare once more in {train}"
        )
    elif compute == "float64" and train is None:
        paths.append(
            f"kernels of {', '.join(_LOW_PRECISION)} (flash attention, grouped matmul): compared "
            "in float64, which takes other ones. Compare once more in the dtype you train in"
        )
    used = _paths(parallel)
    paths += [
        f"{path}: used by the run, not by what was compared"
        for path in _paths(reference)
        if path not in used
    ]
    compiled = {
        item["name"]
        for index in parallel.ranks
        for item in index.not_recorded
        if "compile" in item["why"]
    }
    if compiled:
        paths.append(f"inside of compiled modules: {', '.join(sorted(compiled)[:3])}")
    return paths


def _paths(trace: TraceReader) -> list[str]:
    said = trace.facts.run.get("paths")
    return [str(path) for path in said] if isinstance(said, list) else []
