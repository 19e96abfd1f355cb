"""Compare what two runs say about themselves, before any number: most real cases end there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paralign.align.explain.context import MeshAxes
from paralign.align.trace import Kind
from paralign.align.trace_reader import TraceReader
from paralign.align.verdict import Finding

# Facts that make two runs different training runs. Others (micro-batches, world size, schedule) may
# differ: that is what parallel means.
MUST_AGREE = (
    "compute_dtype",
    "global_batch",
    "seq_len",
    "clip",
    "seed",
    "dropout",
    "data",
    "model",
)


def fact_findings(reference: TraceReader, parallel: TraceReader) -> list[Finding]:
    """Return one finding per fact, optimizer option and frozen parameter that does not agree."""
    return [
        *_run_facts(reference.facts.run, parallel.facts.run),
        *_optimizers(reference, parallel),
        *_trainable(reference, parallel),
    ]


def fact_notes(reference: TraceReader, parallel: TraceReader) -> list[str]:
    """Return the differences that are allowed, for the reader to know."""
    ours, theirs = reference.facts, parallel.facts
    notes = []
    if ours.world_size != theirs.world_size:
        notes.append(
            f"world size: {ours.world_size} in the reference, {theirs.world_size} in parallel"
        )
    for name, value in sorted(ours.run.items()):
        other = theirs.run.get(name, value)
        if other != value and name not in MUST_AGREE:
            notes.append(f"{name}: {value} in the reference, {other} in parallel")
    for name, version in sorted(ours.versions.items()):
        other = theirs.versions.get(name, version)
        if other != version:
            notes.append(f"{name}: {version} in the reference, {other} in parallel")
    return notes


def _run_facts(reference: dict[str, Any], parallel: dict[str, Any]) -> Iterator[Finding]:
    for name in MUST_AGREE:
        if name in reference and name in parallel and reference[name] != parallel[name]:
            yield _different(name, reference[name], parallel[name])


def _optimizers(reference: TraceReader, parallel: TraceReader) -> Iterator[Finding]:
    ours = {name: options for _, name, options in _options(reference)}
    mesh = MeshAxes(parallel)
    differing: dict[tuple[str, str, str], set[tuple[int, str]]] = {}
    values: dict[tuple[str, str, str], tuple[Any, Any]] = {}
    agreeing: dict[str, set[int]] = {}
    for rank, name, theirs in _options(parallel):
        for option in ours[name].keys() | theirs.keys() if name in ours else ():
            pair = ours[name].get(option), theirs.get(option)
            if pair[0] != pair[1]:
                key = (option, repr(pair[0]), repr(pair[1]))
                differing.setdefault(key, set()).add((rank, name))
                values[key] = pair
            else:
                agreeing.setdefault(option, set()).add(rank)
    for key in sorted(differing):
        names = sorted({name for _, name in differing[key]})
        ranks = sorted({rank for rank, _ in differing[key]})
        finding = _different(f"optimizer {key[0]}", *values[key])
        finding.tensor = names[0]
        finding.evidence["parameters"] = len(names)
        if not agreeing.get(key[0], set()) & set(ranks):
            everyone = sorted({*ranks, *agreeing.get(key[0], set())})
            finding.axes = mesh.named(mesh.coordinates_that_tell(ranks, everyone))
            finding.evidence["ranks"] = ranks
        yield finding


def _options(trace: TraceReader) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield rank, parameter, and the class and the options of the optimizer that steps it there."""
    for index in trace.ranks:
        for optimizer in index.optimizers:
            for group in optimizer["groups"]:
                for name in group["names"]:
                    yield index.rank, name, {"class": optimizer["class"], **group["options"]}


def _trainable(reference: TraceReader, parallel: TraceReader) -> Iterator[Finding]:
    ours, theirs = _flags(reference), _flags(parallel)
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            finding = _different(f"requires_grad of {name}", ours[name], theirs[name])
            finding.tensor = name
            yield finding


def _flags(trace: TraceReader) -> dict[str, bool]:
    return {
        name: entry.trainable
        for index in trace.ranks
        for entry in index.tensors
        if entry.kind in (Kind.PARAM, Kind.GRAD)
        for name in (entry.name, *entry.aliases)
    }


def _different(fact: str, reference: Any, parallel: Any) -> Finding:
    return Finding(
        component="config",
        cause="different_config",
        evidence={"fact": fact, "reference": reference, "parallel": parallel},
        fix=f"{fact} is {reference!r} in the reference and {parallel!r} in the parallel run. Give "
        "both the same.",
    )
