"""Explain inputs: which tokens, labels and positions each rank was fed, and which it should be.

The reference's inputs are the global batch. Every micro-batch of every rank is looked up in it by
content. Ranks that differ along dp must hold different samples, ranks along cp different slices of
the same samples, ranks along pp and tp the same; labels and positions are those of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from paralign.align.explain.context import Context
from paralign.align.explain.fed import Fed, fed_at
from paralign.align.explain.labels import explain_labels
from paralign.align.token_map import (
    Inputs,
    Key,
    find_tokens,
    step_inputs,
    step_samples,
    token_table,
    told_inputs,
)
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

DIFFERENT_DATA = "different_data"
FULL_SEQUENCE = "full_sequence"
PERMUTED_SHARDS = "permuted_shards"
MASK_OR_POSITIONS = "mask_or_positions"

# Axes whose ranks share the samples of a batch, each with a slice or a part of the work.
_SAME_SAMPLES = ("cp", "tp", "sp", "pp")


def explain_data(context: Context, step: int) -> list[Finding]:
    """Explain inputs that are not the reference's."""
    # Rows that were dealt wrong are all in the batch, so the inputs by themselves may pass.
    suspects = (Kind.INPUT, Kind.OUTPUT, Kind.GRAD)
    if not any(context.failing(kind, step) for kind in suspects):
        return []
    fed = fed_at(context, step)
    if fed is None:
        return []
    for look in (
        _whole_sequences,
        _earlier_batch,
        _not_there,
        _other_samples,
        _same_samples,
        _repeated,
        _positions,
    ):
        finding = look(context, fed, step)
        if finding is not None:
            return [finding]
    return explain_labels(context, _labels(context, fed, step), step)


def _whole_sequences(context: Context, fed: Fed, step: int) -> Finding | None:
    """Ranks along cp hold whole rows, the same ones, where slices are due."""
    length = fed.table.shape[1]
    for axis in [axis for axis in context.mesh.live if axis in ("cp", "sp")]:
        whole = [k for k, given in fed.inputs.items() if given["tokens"].shape[1] == length]
        if len(whole) == len(fed.inputs) and not _differing(context, fed.inputs, axis):
            size = context.mesh.sizes[axis]
            return _finding(
                FULL_SEQUENCE,
                (axis,),
                step,
                f"Every rank along {axis} is fed the whole sequence of {length} tokens, where a "
                f"slice of {length // size} is due: cut tokens and labels over {axis} before the "
                "model sees them.",
            )
    return None


def _earlier_batch(context: Context, fed: Fed, step: int) -> Finding | None:
    """All rows are those of an earlier step."""
    if any(not held.lost for held in fed.held.values()):
        return None
    reference = context.reference.reader
    for earlier in sorted((s for s in context.steps if s < step), reverse=True):
        table = token_table(step_inputs(reference, earlier), step_samples(reference, earlier))
        if table is None:
            continue
        found = [
            find_tokens({"tokens": given["tokens"]}, table, context.trace.ranks[key[0]])
            for key, given in fed.inputs.items()
        ]
        if not any(held.lost for held in found):
            return _finding(
                DIFFERENT_DATA,
                (),
                step,
                f"The run was fed the batch of step {earlier} again at step {step}: make the "
                "loader once, outside of the step.",
                {"of_step": earlier},
            )
    return None


def _not_there(context: Context, fed: Fed, step: int) -> Finding | None:
    """Some ranks' rows are nowhere in the global batch."""
    lost = sorted({key[0] for key, held in fed.held.items() if held.lost})
    if not lost:
        return None
    everyone = sorted({key[0] for key in fed.held})
    axes = context.mesh.coordinates_that_tell(lost, everyone)
    rows = sum(len(held.lost) for held in fed.held.values())
    return _finding(
        DIFFERENT_DATA,
        tuple(context.mesh.named(axes)),
        step,
        f"{rows} rows that rank {', '.join(map(str, lost))} was fed are nowhere in the reference's "
        "batch. Give both runs the same batch, dealt by the coordinates on dp alone.",
        {"ranks": lost, "rows": rows},
    )


def _other_samples(context: Context, fed: Fed, step: int) -> Finding | None:
    """Ranks that share a batch hold other samples of it."""
    samples = fed.by_rank(fed.samples)
    for axis in [axis for axis in context.mesh.live if axis in _SAME_SAMPLES]:
        pairs = list(_pairs(context, samples, axis))
        if any(samples[a] != samples[b] and not fed.may_share(a, b) for a, b in pairs):
            return _finding(
                DIFFERENT_DATA,
                (axis,),
                step,
                f"Ranks along {axis} hold different samples, where they share one batch: deal "
                "samples by the coordinates on dp, not by the global rank.",
            )
    return None


def _same_samples(context: Context, fed: Fed, step: int) -> Finding | None:
    """Ranks along dp hold the same samples, in the place of others."""
    samples = fed.by_rank(fed.samples)
    if set().union(*map(_flat, samples.values())) >= set(range(fed.table.shape[0])):
        return None  # nothing is left out: along ep, say, all ranks may work on the same rows
    for axis in [axis for axis in context.mesh.live if axis not in _SAME_SAMPLES]:
        if any(_flat(samples[a]) & _flat(samples[b]) for a, b in _pairs(context, samples, axis)):
            return _finding(
                DIFFERENT_DATA,
                tuple(context.mesh.named((axis,))),
                step,
                f"Ranks along {axis} were fed the same samples, and others of the batch were left "
                f"out: deal each rank of {axis} its own rows.",
            )
    return None


def _repeated(context: Context, fed: Fed, step: int) -> Finding | None:
    """Micro-batches of one rank hold the same samples."""
    for rank, groups in fed.by_rank(fed.samples).items():
        seen: set[object] = set()
        for group in groups:
            rows = set(group) if isinstance(group, tuple) else {group}
            if rows & seen:
                return _finding(
                    DIFFERENT_DATA,
                    (),
                    step,
                    f"Rank {rank} was fed the same samples in several micro-batches: take the next "
                    "rows for each.",
                    {"rank": rank},
                )
            seen |= rows
    return None


def _positions(context: Context, fed: Fed, step: int) -> Finding | None:
    """Told positions are not where the tokens are."""
    wrong: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for key, given in sorted(fed.inputs.items()):
        told = given.get("positions")
        if told is None or not fed.places(key):
            continue
        row = tuple(int(at) for at in (told[0] if told.dim() == 2 else told).tolist())
        if row != fed.places(key):
            wrong.setdefault(key[0], (row, fed.places(key)))
    if not wrong:
        return None
    ranks = {rank: row for rank, (row, _) in wrong.items()}
    axis = next((axis for axis in context.mesh.live if axis in ("cp", "sp")), None)
    axes = () if axis is None else (axis,)
    rank, (row, place) = next(iter(wrong.items()))
    shown = f"rank {rank} holds tokens {_run(place)} with positions {_run(row)}"
    told_all = {
        key[0]: tuple(int(at) for at in given["positions"][0].tolist())
        for key, given in fed.inputs.items()
        if "positions" in given and given["positions"].dim() == 2
    }
    peers = [] if axis is None else [p for p in context.mesh.peers(rank, (axis,)) if p in told_all]
    covered = sorted(at for peer in peers for at in told_all[peer])
    if axis is not None and covered == list(range(len(covered))):
        return _finding(
            PERMUTED_SHARDS,
            axes,
            step,
            f"Slices of the sequence are on other ranks of {axis} than their positions: {shown}.",
            {"ranks": sorted(ranks)},
        )
    return _finding(
        MASK_OR_POSITIONS,
        axes,
        step,
        f"Positions are not those of the tokens: {shown}. Pass global positions; a slice does not "
        "start at 0.",
        {"ranks": sorted(ranks)},
    )


def _labels(
    context: Context, fed: Fed, step: int
) -> dict[int, list[tuple[Tensor, Tensor, Tensor, tuple[int, ...]]]]:
    """Return per rank, of each micro-batch: labels, what they should be, tokens, positions."""
    told = told_inputs(context.reference.reader, step)
    rows = {
        tuple(row): given["labels"][number]
        for given in told.values()
        if "tokens" in given and "labels" in given
        for number, row in enumerate(given["tokens"].tolist())
    }
    found: dict[int, list[tuple[Tensor, Tensor, Tensor, tuple[int, ...]]]] = {}
    for key, given in sorted(step_inputs(context.trace, step).items()):
        if "labels" not in given or key not in fed.held:
            continue
        samples, places = fed.samples(key), fed.places(key)
        right = [rows.get(tuple(fed.table.tokens[sample].tolist())) for sample in samples]
        whole = [row for row in right if row is not None]
        if len(whole) != given["labels"].shape[0] or not places:
            continue
        at = torch.tensor(places)
        due = torch.stack([row[at] for row in whole])
        if due.shape == given["labels"].shape:
            found.setdefault(key[0], []).append((given["labels"], due, given["tokens"], places))
    return found


def _pairs(context: Context, known: Mapping[int, object], axis: str) -> Iterable[tuple[int, int]]:
    """Yield pairs of neighbouring ranks along an axis."""
    for rank in known:
        peers = [peer for peer in context.mesh.peers(rank, (axis,)) if peer in known]
        for peer in peers:
            if peer > rank:
                yield rank, peer


def _differing(context: Context, inputs: Mapping[Key, Inputs], axis: str) -> bool:
    """Whether any two ranks along an axis were fed different tokens."""
    by_rank: dict[int, object] = {}
    for key in sorted(inputs):
        content = tuple(map(tuple, inputs[key]["tokens"].tolist()))
        before = by_rank.get(key[0], ())
        assert isinstance(before, tuple), "set below"
        by_rank[key[0]] = (*before, content)
    return any(by_rank[a] != by_rank[b] for a, b in _pairs(context, by_rank, axis))


def _flat(groups: Sequence[object]) -> set[object]:
    return {row for group in groups if isinstance(group, tuple) for row in group}


def _run(places: Sequence[int]) -> str:
    return f"{places[0]}..{places[-1]}" if places else "none"


def _finding(
    cause: str,
    axes: tuple[str, ...],
    step: int,
    fix: str,
    detail: Mapping[str, object] | None = None,
) -> Finding:
    return Finding(
        component="data",
        cause=cause,
        tensor="tokens" if cause != MASK_OR_POSITIONS else "positions",
        axes=list(axes),
        evidence={
            "eps_before": None,
            "eps_after": None,  # no tensor was corrected: tokens are equal or they are not
            "share_beyond_2e-3": None,
            "step": step,
            **(detail or {}),
        },
        fix=fix,
    )
