"""Initial weights that repeat or miss something: shards drawn from one seed, layers lost."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence

from paralign.align.inspect.replicas import describe_ranks
from paralign.align.inspect.report import Check
from paralign.align.inspect.view import OF_STAGE, Held, View
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

_FEWEST_ELEMENTS = 8  # fewer may be equal by chance or by design
_LAYER = re.compile(r"^(.*?\.)(\d+)(\..+)$")


def check_weights(view: View) -> Check:
    """Look for equal shards, equal stages, and layers that no rank or two stages hold."""
    check = Check("weights")
    held = view.tensors(Kind.PARAM, view.steps[0]) if view.steps else {}
    check.looked_at = len(held)
    if not held:
        check.why_not = "no initial parameters were recorded"
        return check
    check.findings += [
        *_not_finite(view, held),
        *_equal_shards(view, held),
        *_equal_stages(view, held),
        *_wrong_layers(view, held),
    ]
    return check


def _not_finite(view: View, held: Mapping[str, Sequence[Held]]) -> Iterator[Finding]:
    bad = {
        name: sorted(p.rank for p in pieces if p.entry.file and view.fingerprint(p).nonfinite)
        for name, pieces in held.items()
    }
    bad = {name: ranks for name, ranks in bad.items() if ranks}
    if bad:
        first, ranks = next(iter(bad)), sorted({rank for found in bad.values() for rank in found})
        yield Finding(
            component="weights",
            cause="unknown",
            tensor=first,
            evidence={"parameters": len(bad), "names": list(bad)[:8], "ranks": ranks},
            fix=f"{len(bad)} parameters are NaN or infinite before the first step, on "
            f"{describe_ranks(ranks)}. Initialise them, or load a checkpoint that holds them.",
            where=view.where(first),
        )


def _equal_shards(view: View, held: Mapping[str, Sequence[Held]]) -> Iterator[Finding]:
    """Find parameters whose different shards have the same content: one seed on every rank."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, pieces in held.items():
        by_digest: dict[bytes, dict[Hashable, int]] = {}
        places = {piece.place for piece in pieces}
        for piece in _telling(view, pieces):
            places_of = by_digest.setdefault(view.fingerprint(piece).digest, {})
            places_of.setdefault(piece.place, piece.rank)
        equal = [at for at in by_digest.values() if len(at) > 1]
        if len(places) > 1 and equal:
            ranks = list(equal[0].values())
            axes = tuple(_axes_between(view, ranks[0], ranks[1]))
            found.setdefault(axes, []).append(name)
    for axes, names in found.items():
        yield Finding(
            component="weights",
            cause="rng",
            tensor=names[0],
            axes=list(axes),
            evidence={"parameters": len(names), "names": names[:8]},
            fix=f"{len(names)} parameters have shards over {', '.join(axes) or 'ranks'} that hold "
            "the same values. Draw the whole tensor from one seed and cut it, or give each shard "
            "a seed of its own. If they are copies, not shards, tell the recorder.",
            where=view.where(names[0]),
        )


def _equal_stages(view: View, held: Mapping[str, Sequence[Held]]) -> Iterator[Finding]:
    """Find stages whose layers have the same content under different names."""
    by_digest: dict[bytes, list[tuple[str, Held]]] = {}
    for name, pieces in held.items():
        for piece in _telling(view, pieces):
            by_digest.setdefault(view.fingerprint(piece).digest, []).append((name, piece))
    pairs: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for same in by_digest.values():
        for name, piece in same[:1]:
            for other, elsewhere in same[1:]:
                if name != other and not _is_tied(piece, other):
                    pairs.setdefault((piece.rank, elsewhere.rank), []).append((name, other))
    # Tied weights are one pair; a stage that repeats another has a pair for every weight.
    told = {frozenset(pair) for found in pairs.values() if len(found) > 1 for pair in found}
    if not told:
        return
    ranks = next(ranks for ranks, found in pairs.items() if len(found) > 1)
    names = pairs[ranks]
    axes = [axis for axis in _axes_between(view, *ranks) if axis in view.axes]
    yield Finding(
        component="weights",
        cause="rng",
        tensor=names[0][1],
        axes=axes,
        evidence={"parameters": len(told), "names": [list(pair) for pair in names[:8]]},
        fix=f"{len(told)} parameters begin with exactly the values of another one, first "
        f"{names[0][1]} with those of {names[0][0]}. Stages or layers that begin from the same "
        "seed repeat each other: seed by layer, or initialise the whole model before it is split.",
        where=view.where(names[0][1]),
    )


def _wrong_layers(view: View, held: Mapping[str, Sequence[Held]]) -> Iterator[Finding]:
    """Find numbered layers that no stage holds, or that two stages hold."""
    if "pp" not in view.axes:
        return
    stages: dict[str, dict[int, set[int]]] = {}
    parts: dict[str, set[str]] = {}
    for name, pieces in held.items():
        match = _LAYER.match(name)
        if match is not None and OF_STAGE not in name:
            holders = stages.setdefault(match[1], {}).setdefault(int(match[2]), set())
            holders |= {view.coordinate(piece.rank, "pp") for piece in pieces}
            parts.setdefault(match[1], set()).add(match[3])
    for prefix, layers in stages.items():
        twice = sorted(number for number, holders in layers.items() if len(holders) > 1)
        lost = _lost(layers) if len(parts[prefix]) > 2 else []
        if lost or twice:
            words = [f"no stage holds {prefix}{number}" for number in lost]
            words += [
                f"{prefix}{number} is held by the stages {sorted(layers[number])}"
                for number in twice
            ]
            yield Finding(
                component="weights",
                cause="wrong_layer",
                tensor=f"{prefix}{(lost or twice)[0]}",
                axes=["pp"],
                evidence={"lost": lost, "twice": twice},
                fix=f"{'; '.join(words)}. Each layer belongs to exactly one stage: look at the "
                "first and last layer of every stage.",
            )


def _lost(layers: Mapping[int, set[int]]) -> list[int]:
    """Return missing numbers between two stages; a gap inside of a stage is how it was numbered."""
    numbers = sorted(layers)
    gaps = [(a, b) for a, b in itertools.pairwise(numbers) if b - a > 1]
    if any(layers[a] & layers[b] for a, b in gaps):
        return []
    return [number for a, b in gaps for number in range(a + 1, b)]


def _telling(view: View, pieces: Sequence[Held]) -> Iterator[Held]:
    """Yield the pieces whose content says something: not constant, and not tiny."""
    for piece in pieces:
        if piece.entry.file is not None:
            found = view.fingerprint(piece)
            if not found.is_constant and found.elements >= _FEWEST_ELEMENTS:
                yield piece


def _axes_between(view: View, rank: int, other: int) -> Iterator[str]:
    for axis in view.axes:
        if view.coordinate(rank, axis) != view.coordinate(other, axis):
            yield axis


def _is_tied(piece: Held, other: str) -> bool:
    return other in piece.entry.aliases or piece.entry.source == other
