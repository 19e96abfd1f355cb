"""The run that tells apart what one run's numbers cannot: the same, with sizes that all differ.

A gradient that is twice too large points at every axis of two ranks. With two, three and five ranks
the factor follows the guilty one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product
from typing import TYPE_CHECKING

from paralign.config.rules import find_problems
from paralign.config.run import RunConfig
from paralign.errors import ParalignError

if TYPE_CHECKING:
    from paralign.align.explain.candidates import Candidate
    from paralign.align.verdict import Finding, Report

MICROBATCHES = "num_microbatches"
MOST_RANKS = 16
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8)


def separating_config(config: RunConfig, finding: Finding) -> RunConfig | None:
    """Return a config near ``config`` in which the candidates of ``finding`` differ in size.

    A candidate without axes keeps the factor that was found, whatever the sizes.

    None: nothing is to be told apart by sizes, or no legal config of at most 16 ranks does it.
    """
    sources, stays = _sources(finding)
    if not sources or len(sources) + (stays is not None) < 2:
        return None
    names = sorted({name for source in sources for name in source})
    if not set(names) <= dict(_sizes_of(config)).keys():
        return None  # a product of axes, which has no size of its own in a config
    best: tuple[tuple[bool, int, int], RunConfig] | None = None
    for sizes in product(_SIZES, repeat=len(names)):
        chosen = dict(zip(names, sizes, strict=True))
        products = [math.prod(chosen[name] for name in source) for source in sources]
        gone = 1 in products  # then the factor is gone as well, if it was this axis's
        if len({*products, stays}) <= len(products) or (gone and len(sources) > 1):
            continue
        if not _is_mesh(config, chosen):
            continue
        changed = _resized(config, chosen)
        cost = (gone, changed.mesh.degrees.world_size, sum(sizes))
        if cost[1] > MOST_RANKS or (best is not None and cost >= best[0]):
            continue
        if _is_told_apart(changed, sources, stays) and not find_problems(changed):
            best = cost, changed
    return None if best is None else best[1]


def separate(
    config: RunConfig, report: Report, rerun: Callable[[RunConfig], Report]
) -> tuple[Report, str | None]:
    """Make the run that decides between the candidates of the first finding, if sizes can.

    Args:
        config: The run.
        report: Its verdict; the first finding is completed where the second run decides.
        rerun: Runs another config, with the same fault, and judges it.

    Returns:
        The report, and what the second run was and said; None: none was made.
    """
    first = report.findings[0] if report.findings else None
    changed = separating_config(config, first) if first is not None else None
    if first is None or changed is None:
        return report, None
    told = describe_change(config, changed)
    try:
        second = rerun(changed)
    except ParalignError as error:
        return report, f"{told}: it did not come to its end ({str(error).splitlines()[0]})"
    decided = _decide(first, second, _live(changed))
    if decided is None:
        return report, f"{told}: it did not decide"
    first.component, first.cause, first.axes = decided.component, decided.cause, list(decided.axes)
    first.candidates, first.separate_by = list(decided.candidates), decided.separate_by
    first.evidence["separated_by"] = told
    place = f" over {' x '.join(decided.axes)}" if decided.axes else ""
    first.fix += f" A second run with {told} decides: {decided.component}/{decided.cause}{place}."
    return report, f"{told}: {decided.component}/{decided.cause}{place}"


def describe_change(config: RunConfig, changed: RunConfig) -> str:
    """Write the keys that differ: ``mesh.cp=3 pipeline.num_microbatches=5``."""
    ours, theirs = config.model_dump(mode="json"), changed.model_dump(mode="json")
    return " ".join(
        f"{section}.{key}={value}"
        for section, keys in theirs.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
        if ours[section].get(key) != value
    )


def _sources(finding: Finding) -> tuple[list[tuple[str, ...]], int | None]:
    """Return the groups of sizes that the candidates point at, and a factor that follows none."""
    from paralign.align.explain.candidates import meanings

    if finding.separate_by is None or not finding.candidates:
        return [], None
    sources: dict[tuple[str, ...], None] = {}
    stays: int | None = None
    for meaning in meanings(finding)[1:]:
        if meaning.axes:
            sources[tuple(sorted(meaning.axes))] = None
        elif MICROBATCHES in finding.separate_by:
            sources[(MICROBATCHES,)] = None
        elif "factor" in finding.evidence:
            stays = _size_of(str(finding.evidence["factor"]))
    return list(sources), stays


def _size_of(factor: str) -> int | None:
    """Return the size that a factor such as 6 or 1/6 is made of; None if it is none."""
    try:
        ratio = abs(Fraction(factor))
    except ValueError:
        return None
    sizes = {ratio.numerator, ratio.denominator} - {1}
    return sizes.pop() if len(sizes) == 1 else None


def _is_mesh(config: RunConfig, sizes: Mapping[str, int]) -> bool:
    """Whether ep, which is carved out of other axes, divides them."""
    mesh = {**config.mesh.model_dump(mode="json"), **sizes}
    return bool((mesh["dp_shard"] * mesh["cp"] * mesh["tp"]) % mesh["ep"] == 0)


def _resized(config: RunConfig, sizes: dict[str, int]) -> RunConfig:
    """Return ``config`` with other sizes, and a batch that divides into them."""
    axes = {name: size for name, size in sizes.items() if name != MICROBATCHES}
    mesh = config.mesh.model_copy(update=axes)
    pieces = sizes.get(MICROBATCHES, config.pipeline.num_microbatches)
    pipeline = config.pipeline.model_copy(update={MICROBATCHES: pieces})
    if mesh.pp != config.mesh.pp:
        pipeline = pipeline.model_copy(update={"layers_per_stage": None})
    share = mesh.dp_replicate * mesh.dp_shard * pieces
    rows = math.ceil(config.batch.global_batch / share) * share
    seq_len = math.ceil(config.batch.seq_len / (2 * mesh.cp)) * 2 * mesh.cp
    batch = config.batch.model_copy(update={"global_batch": rows, "seq_len": seq_len})
    return config.model_copy(update={"mesh": mesh, "pipeline": pipeline, "batch": batch})


def _is_told_apart(config: RunConfig, sources: Sequence[Sequence[str]], stays: int | None) -> bool:
    """Whether no other axis, or product of axes, has the size of a candidate."""
    live = _live(config)
    made: dict[int, list[set[str]]] = {}
    for count in range(1, len(live) + 1):
        for names in combinations(live, count):
            made.setdefault(math.prod(live[name] for name in names), []).append(set(names))
    for source in sources:
        own = {name for name in source if name in live}
        size = math.prod(live[name] for name in own)
        if any(other != own for other in made.get(size, [])):
            return False
    return stays is None or stays not in made


def _live(config: RunConfig) -> dict[str, int]:
    """Return the axes with more than one rank, and the micro-batches, with their sizes."""
    return {name: size for name, size in _sizes_of(config) if size > 1}


def _sizes_of(config: RunConfig) -> Iterator[tuple[str, int]]:
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        yield axis, getattr(config.mesh, axis)
    yield MICROBATCHES, config.pipeline.num_microbatches


def _decide(first: Finding, second: Report, live: Mapping[str, int]) -> Finding | None:
    """Return the finding of the second run as the first one's candidate, if it says less.

    A second run that lists as many places as the first has decided nothing. Axes that have one rank
    in it are those of the candidate still.
    """
    from paralign.align.explain.candidates import meanings

    listed = meanings(first)
    if not second.findings:
        gone = [m for m in listed if m.axes and not set(m.axes) & live.keys()]
        if second.verdict != "aligned" or len({m.axes for m in gone}) != 1:
            return None
        found = replace(first, candidates=[], separate_by=None)
        found.component, found.cause, found.axes = gone[0].component, gone[0].cause, [*gone[0].axes]
        return found
    found = second.findings[0]
    seen = (found.component, frozenset(found.axes), found.cause)
    right = {
        frozenset(m.axes): m.axes
        for m in listed
        if (m.component, frozenset(m.axes) & live.keys(), m.cause) == seen
    }
    if len(right) != 1 or not _num_places(meanings(found)) < _num_places(listed):
        return None
    return replace(found, axes=list(*right.values()))


def _num_places(listed: Sequence[Candidate]) -> int:
    return len({(m.component, frozenset(m.axes), m.cause) for m in listed})
